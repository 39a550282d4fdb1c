"""Tell whether a response declines to answer, in English.

A response is cut into clauses, and every word of a clause gets the letter of its class:

    the passage does not say     f S M V    declines
    no antibiotics were given    n X f G    X, a word outside the classes and the question: news
    size 42                      q D        D, a figure that the question has not

A clause declines that negates telling, knowing or information and brings no news, or whose form
leaves no doubt: "the text does not mention a boot". Beside it there may be an apology, what the
text is about instead, a request for more. A response with any other clause answers: "not stated,
but probably 42". Words of declining in an answer do not count: "The Unknown Soldier", "not
mentioned in dispatches until 1916".
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from cartridge_forge.plugins.clinic.text import plain_signs

MOST_WORDS = 60  # of a clause that may decline
Kind = Literal["declining", "beside it", "other"]

# Words without their endings by the letter of their class; the first class that has a word counts.
_CLASSES = {
    "N": "not nowhere neither without",
    "n": "no none insufficient inadequate zero",
    "R": "never fail neglect unable",
    "M": "donot",  # a negated auxiliary, see `_PHRASES`
    "Z": "nothing",
    "U": "unknown unspecified undisclosed unstated unanswerable unclear indeterminate undetermined "
         "unmentioned uncertain unanswered unavailable unidentified undefined unknowable unlisted "
         "unexplained indeterminable undeterminable unrecorded unreported unaddressed unresolved "
         "undocumented inconclusive unsure unaware unsaid unpublished unnamed undated unquantified "
         "untold tbd tba",
    "H": "impossible hard difficult",
    "L": "lack absent absence missing omit silent mute vague withhold withheld skip",
    # verbs of texts (V, T), of readers (K) and of givers (G), and those said of things too
    "V": "say said state mention specify tell told disclose indicate reveal discuss address "
         "explain clarify elaborate stipulate refer divulge cite allude convey",
    "K": "know known knowable determine determinable answer answerable infer inferable inferrable "
         "sure certain aware ascertain ascertainable deduce deducible derive derivable discern "
         "discernible glean conclude possible speculate guess respond",
    "F": "find found identify establish verify confirm judge locate",
    "G": "give given gave provide offer make made supply",
    "T": "contain include cover define detail",
    "W": "list listed described show shown recorded reported noted documented clear explicit "
         "apparent evident obvious written published named spelled quantified announced logged "
         "printed",
    "A": "present available applicable covered included contained relevant",
    "C": "context content material information info data",  # what is told, and what tells it
    "B": "details reference indication discussion description explanation",
    "I": "clue hint idea basis fact evidence statement way means knowledge specifics word sign "
         "trace clarity access",
    "S": "document text passage article chart paragraph report record file note source author "
         "writer story letter contract page excerpt section book chapter summary transcript "
         "snippet paper study manual guide handbook email memo agreement policy narrator narrative "
         "extract abstract website writing table line sentence speaker entry leaflet brochure "
         "lease form post poem novel interview deed certificate catalogue timetable schedule "
         "itinerary invoice notice bulletin newsletter profile biography obituary review essay "
         "thesis diary journal dossier script speech lecture clause caption log quote quotation "
         "prompt input biographer reporter filing brief overview plan recipe wiki",
    "P": "i we one",
    "t": "it this that they these those",
    "w": "which what who whom whose when where why how whether if",
    "b": "about regarding concerning",
    "c": "on of to",
    "p": "in from within by inside throughout using per anywhere elsewhere out outside beyond "
         "among part into",
    "o": "only just merely solely",
    "e": "be been being",
    "y": "date number name reason time year place location cause amount identity title kind type "
         "depth length height width weight price cost colour color rate percentage total duration "
         "owner origin outcome result method purpose birthplace birthday deadline address brand "
         "age size distance salary motive",
    "a": "explicitly directly actually really specifically clearly even ever exactly precisely "
         "currently yet quite simply expressly personally all any either seem appear at alone "
         "definitively reliably further so still also itself honestly conclusively fully there "
         "here now enough sufficient too truly genuinely very much more generally publicly such "
         "apparently occur exist feature whatsoever",
    "r": "is are",
    "h": "have has had hold help allow see go",
    "f": "a an the his her its their my your our for with and or as was were am do does did "
         "can could may might will would should must he she him them you me us than over both each "
         "based according remain stay above below ask question request exact specific precise "
         "particular correct actual right sort value topic subject thing anything something anyone "
         "matter issue person people think believe judging look after though although however but "
         "because since while then therefore full sorry afraid apologies unfortunately regrettably "
         "sadly well hmm please thanks some certainty relation regard respect ok okay",
}  # fmt: skip
_LETTERS = {w: letter for letter in reversed(_CLASSES) for w in _CLASSES[letter].split()}

# Clauses, as letters.
_VERB, _TEXT, _FACT = "[VKFGTWA]", "[SC]", "[BC]"
_REST = "[^XDNnRMZUHL]*"  # words that bring no news
_FEW, _MORE = ".{0,3}?", ".{1,8}?"  # any words
_END = f"[apfycr]*(?:[pc][fa]*{_TEXT}{_REST})?$"  # "in the text"


def _patterns(*lines: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{line})" for line in lines))


_WITHOUT_NEWS = _patterns(
    f"[NRMZ][^Z]*{_VERB}|n[^Z]*{_VERB}(?!q)|[NnRM].*[BCI]|U(?![SCBIqy])|H.*{_VERB}",
    f"[MN]a*p{_REST}{_TEXT}|nq+p{_REST}{_TEXT}",  # not in the text, no size in the text
    f"[SCVGTW]{_REST}Z|Z{_REST}[SCVKFGTWB]",  # it says nothing, nothing is said
    f"[SCtP]{_REST}[VGTh]{_REST}n",  # it gives no size
    f"{_TEXT}{_REST}[MR]a*(?:h|$)|P[MR]a*h{_REST}[SCBIt]",  # the text does not have it
    f"[qBC]{_REST}N$|^N[fa]*(?:q+|w[qfa]+)$",  # the size is not, not the size
    # the text omits it, the size is missing
    f"{_TEXT}{_REST}L|[tqBCI]{_REST}L|^a*Lb|PL{_REST}[BCI]|L{_REST}p{_REST}{_TEXT}",
)
_WITH_NEWS = _patterns(
    f"^{_REST}{_TEXT}.{{0,6}}?[MR]a*(?:{_VERB}|h)",  # the text does not provide a boot
    "^[aforpw]*t?a*[MR]a*(?:V|[GTF]f*y)",  # it does not mention a boot
    f"^{_REST}[NnZ][afc]*p?[fa]*S{_FEW}{_VERB}",  # nothing in the text says ...
    f"^{_REST}{_TEXT}{_FEW}(?:L|{_VERB}{_REST}Z|G[aft]*n)",  # the text omits a boot
    f"^[arftopSCP]*(?:[VGT]a*|h)?(?:[NM][afhF]*|n)a*(?:{_FACT}|V)[wbc]",  # no data on a boot
    "^[arfpoc]*(?:P?[ah]*Z[apfSC]*b|a*Lb)",  # nothing about a boot, silent on it
    "^[afpo]*P[afo]*[MRN]a*[VKF](?:[wtpbcfay]|$)",  # I do not know what a boot is
    "^[afpo]*P[ah]*na*I[wbcp]",  # I have no idea what it is
    # it is not known who he is
    f"^{_REST}(?:t[afr]*)?(?:Na*[VKW]|U|H[afc]*[VKF]|M[afe]*[KF])(?:p[fa]*{_TEXT}a*)?w",
    f"^{_MORE}[frah][NR]e?a*V{_END}",  # his boot is not mentioned
    f"^{_MORE}r[NR]a*[KFGW]{_END}",  # his boot is not given: texts are spoken of in the present
    f"^[^fraM]{{1,5}}Na*[VKGW]{_END}",  # boot not recorded
    f"^.{{0,4}}?y.{{0,5}}?[NR]e?a*{_VERB}{_END}",  # the number of boots was not given
    f"^.{{0,8}}?[Nn].{{0,6}}?{_VERB}a*p[fap]*{_TEXT}{_REST}$",  # no boot is given in the text
    f"^{_MORE}[fra]U{_END}",  # his boot is unknown
    f"^{_MORE}Ma*ea*K{_END}",  # his boot cannot be determined
    f"^{_MORE}[rfM](?:N?a*p|L[pcb])[fap]*{_TEXT}[aSC]*$",  # his boot is not in the text
    f"^[ar]*n.{{1,6}}?(?:[frae]*V|ra*[KFGW]){_END}",  # no boot is mentioned, none is given
)

_SOURCES = (_CLASSES["S"] + " " + _CLASSES["C"]).split()
_SOURCE = r"\b(?:" + "|".join((*_SOURCES, "it", "this", "that", "which")) + r")s?\b"
_BESIDE = re.compile(
    rf"(?:.*?{_SOURCE} |instead |rather |it )?(?:\w+ly |only |just |does |do |instead )*"
    r"(?:mention|discuss|describe|cover|deal|focus|talk|refer|concern|address|concentrat|speak"
    r"|touche?|outline|list|include|contain|name|provide|is about|are about|is on|is limited to"
    r"|is concerned)(?:s|es|ing|ed)?\b.*|.*\b(?:only|merely) .*"
    r"|.+ (?:is|are|was|were) (?:discussed|mentioned|described|listed|covered)"
    r"|as an? (?:ai|language model|assistant)\b.*"
    r"|(?:please|perhaps|maybe|you (?:can|could|may|might|should|would|will|need)"
    r"|(?:could|can|would|do) you|try|if you|let me|feel free"
    r"|i (?:would|will|can|do) (?:need|be|require|suggest|recommend)"
    r"|i (?:suggest|recommend)|consult|ask|check|see|contact|refer)\b.*"
    r"|(?:more|further|additional|another) .*|(?:any|an) (?:\w+ )?(?:answer|guess|response)\b.*"
    r"|i (?:have |had )?(?:read|checked|searched|looked|reviewed|apologi[sz]e|regret)\b.*"
    r"|thank(?:s| you)?\b.*|i would (?:only )?be (?:guessing|speculating).*"
)
_BORDER = re.compile(
    r"(?:(?<!\bdr)(?<!\bmr)(?<!\bms)(?<!\bmrs)(?<!\bst)(?<!\bprof)(?<!\b[a-z])[.]|[!?;:]+)+"
    r"(?=\s|$)|\n+|\s-+\s|[()\[\]]"
    r"|,? \b(?:but|however|(?:even )?though|although|yet|nevertheless|because|since|so|as|while"
    r"|whereas|therefore|thus|hence)\b(?! (?:to|far|for|such|well|much|an?|if|per)\b),?"
    r"|,? and (?=(?:\w+ ){0,4}?(?:not|donot|no|nothing|never|nowhere|fails)\b)"
)
# Words after which what is not told is told elsewhere.
_RESERVATION = re.compile(r"\b(?:otherwise|other|except|apart from|until|else|besides)\b")
_SOURCE_ENDS = ("book", "books", "text", "texts", "sheet", "sheets", "script", "scripts")
_PHRASES = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\bcan(?:not|'?t)\b", "can not"), (r"\bwon'?t\b", "will not"), (r"\bain'?t\b", "is not"),
        (r"\b(do|does|did|is|was|are|were|could|would|should|has|have|had|might)n'?t\b", r"\1 not"),
        (r"\b(i|you|we|they)'?ve\b", r"\1 have"), (r"\bi'?m\b", "i am"), (r"'re\b", " are"),
        (r"\b(it|that|there|what|who|he|she|here|answer|information|text|this)'s\b", r"\1 is"),
        (r"\b(i|you|we|they|he|she|it)'d\b", r"\1 would"), (r"'ll\b", " will"),
        # What people did, where texts are spoken of in the present; what is called unknown; orders.
        (r"\b(?:he|she|they|we) (?:(?:did|had|could|would) not\b(?! be)|(?:said|told|gave|had|made"
         r"|found|knew|mentioned|offered|provided|answered|disclosed)\b)", "news"),
        (r"\b(?:he|she) (?:was|had been) (?:not|never)\b|\b(?:he|she|we) never\b", "news"),
        (r"\b(?:he|she|they) (?:do|does|can) not know\b", "news"),
        (r"^because (?!.*[,:] )", "news "),  # an answer's clause, not a sentence
        (r"\b(?:would |had )?rather not (?:guess|speculate|say|answer)\b", "can not say"),
        (r"\bstops? short of (?=\w+ing\b)", "does not say "),
        (r"\b(?:nobody|no[ -]one) is\b", "no name is"),
        (r"\b(?:as far as|from what) (?:i|we|one) (?:can|could) (?:tell|see|read|make out)\b", ""),
        (r"\bno record of\b", "no mention of"),
        (r"\b(?:the|an?|his|her|its|their|some) (?=un(?!answerable)[a-z]+\b)", "news "),
        (r"^(?:do not|never) (?=(?:say|state|mention|specify|tell|disclose|reveal|discuss)\b)",
         "news "),
        (r"\bhow to (?!answer|say|tell|know|respond|determine)", "news "),
        (r"\b(?:n ?/ ?a|n\.a\.?)(?!\w)", "unknown"), (r"^\s*na\W*$", "unknown"),
        (r"\b(?:anyone|anybody)'s guess\b|\bidk\b|\bdunno\b|\bno (?:clue|idea)$", "unknown"),
        (r"\b(?:no[ -]one|nobody) (?:really )?(?:knows|can (?:say|tell|know))\b", "unknown"),
        (r"\b(?:your|my) guess is as good as \w+|\bwho (?:knows|can (?:say|tell))\b|\bbeats me\b",
         "unknown"),
        (r"\bnot (?:\w+ )?able to\b|\bunable to\b", "unable"), (r"\bfail(s|ed)? to\b", "fail"),
        (r"\b(?:outside|beyond) (?:of )?(?:the )?scope(?: of)?\b|\bout of scope\b", "not in text"),
        (r"\b(?:has|have) not been\b", "is not"), (r"\b(?:has|have) been\b", "is"),
        (r"\b(?:set|lay|spell|make)(?:s?) (?:it |this )?(?:out|clear)\b", "state"),
        (r"\blea(?:ves?|ving) (?:[\w' ]{1,40}? )?(?:open|out|un[a-z]+)\b", "lack it"),
        (r"\bleft (?:open|out|unsaid)\b", "unstated"), (r"\bcomes? up\b", "appear"),
        (r"\bin (?:there|here)\b", "in text"), (r"\bsilent on\b", "silent about"),
        (r"\b(?:no|without) (?:way|means) (?:to|of)\b", "impossible to"),
        (r"\b(?:do|does|did|can|could|would|will|may|might|has|have|had)(?: \w+ly)? not\b",
         "donot"),
    )
)  # fmt: skip
_MARKS = str.maketrans({
    **dict.fromkeys("\u2013\u2014\u2015", " - "), **dict.fromkeys('*#<>"', " "), "\u2026": ". ",
})  # fmt: skip
_TITLE = re.compile(
    r"\W*(?:(?:[A-Z](?=\S*[a-z]|\W)\S*|of|the|an?|and|in|to|for|on|but|from)\W*){3,}"
)  # "Don't Know Why"
_TOLD = re.compile("[^X]*[SCBIVG][^X]*")  # "Not Mentioned"
_OPEN = frozenset(_CLASSES["w"].split())  # words of a question whose answer is not yes or no
_WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")


def declines(response: str, question: str = "") -> bool:
    """Return whether a response to a question declines to answer it; one without a letter, digit or
    symbol does."""
    if not any(unicodedata.category(c)[0] in "LNS" for c in response):
        return True
    stems = {_stem(word) for word in _WORD.findall(_plain(question))}
    if _TITLE.fullmatch(response) and not _TOLD.fullmatch(_letters(_plain(response), stems)):
        return False
    kinds = {_kind(clause, stems) for clause in _BORDER.split(_plain(response))}
    return "declining" in kinds and "other" not in kinds


def _plain(text: str) -> str:
    """Return text in lower case, with plain marks and single spaces, contractions written out."""
    plain = plain_signs(text.translate(_MARKS)).translate(_MARKS).casefold()
    for pattern, words in _PHRASES:
        plain = pattern.sub(words, plain)
    return re.sub(r"[^\S\n]+", " ", plain)


def _kind(clause: str, stems: set[str]) -> Kind:
    words = clause.strip(" ,.'_~-")
    letters = _letters(words, stems)
    if len(letters) > MOST_WORDS:
        return "other"
    if "D" in letters or _RESERVATION.search(words):
        return "other"
    if "X" not in letters and _WITHOUT_NEWS.search(letters):
        return "declining"
    first, *more = words.split(",")
    kinds = [_kind(part, stems) for part in more]
    listed = bool(more) and re.match(r" (?:or|nor|and) ", more[-1])
    if _WITH_NEWS.search(letters) and (listed or "other" not in kinds):
        return "declining"
    if "declining" in (kinds := [_kind(first, stems), *kinds] if more else []):
        return "other" if "other" in kinds else "declining"
    bare = not re.search("[XNnRMZUHL]", letters) or (words == "no" and not stems.isdisjoint(_OPEN))
    if bare or _BESIDE.fullmatch(words) or re.fullmatch(f"[pf].*{_TEXT}[aSC]*", letters):
        return "beside it"
    return "beside it" if kinds and "other" not in kinds else "other"


def _letters(words: str, stems: set[str]) -> str:
    letters = "".join(_letter(word, stems) for word in _WORD.findall(words))
    if not stems or not stems.isdisjoint(_OPEN) or re.search("[SCBP]", letters):
        return letters
    return re.sub("[FGTWA]", "X", letters)  # "it is not included" answers a question of yes or no


def _letter(word: str, stems: set[str]) -> str:
    unlike = "NnMRZBCIS" if word.endswith(("ed", "ing")) else "NnMRZ"  # nouns have no past
    forms = [word, *(form for form in _bases(word) if _LETTERS.get(form, "N") not in unlike)]
    letter = next((_LETTERS[form] for form in forms if form in _LETTERS), "y")
    if letter != "y":
        return letter
    if _stem(word) in stems:
        return "q"
    if any(form in _LETTERS for form in forms):
        return "y"
    if word.endswith(_SOURCE_ENDS):
        return "S"
    if word.endswith("ly") and len(word) > 6:
        return "a"
    return "D" if any(c.isdigit() for c in word) else "X"


def _bases(word: str) -> list[str]:
    """Return the words of which a word may be a form."""
    bases = [word.removesuffix("'s")]
    for ending, replacements in (("ies", ("y",)), ("ied", ("y",)), ("s", ("",)), ("es", ("",)),
                           ("ed", ("", "e")), ("ing", ("", "e"))):  # fmt: skip
        if word.endswith(ending) and len(word) > len(ending) + 2:
            bases += [word[: -len(ending)] + other for other in replacements]
    if re.search(r"([^aeiou])\1(?:ed|ing)$", word):
        bases.append(re.sub(r".(?:ed|ing)$", "", word))
    return bases


def _stem(word: str) -> str:
    """Return what a word shares with its relatives: "paint" for "painter" and "painted"."""
    return min((word, *_bases(word)), key=len)[:5]
