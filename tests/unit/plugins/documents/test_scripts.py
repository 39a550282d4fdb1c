"""Self-study of other scripts and forms: every kind has turns, whose words are the document's."""

import random

import pytest

from cartridge_forge.plugins.documents.chunks import BREAKS
from cartridge_forge.plugins.documents.filters import TextBounds, fault, normalised
from cartridge_forge.plugins.documents.seed_prompts import plain_turn
from cartridge_forge.plugins.documents.text_turns import BLANK, question_fault, quizzed, text_turn
from cartridge_forge.plugins.documents.words import SENTENCE_END, word_spans, words

YEARS = range(1700, 1740)
TEXTS = {
    "chinese": "".join(f"第{y % 40}区的石桥建于{y}年。它用了七年时间。" for y in YEARS),
    "chinese without numbers": "镇长修建了石桥。工匠来自北方！谁记得那座旧木桥？孩子们在岸边玩耍。",
    "one long chinese sentence": "城市在很长的时间里依靠河流运输粮食与木材，" * 12,
    "japanese": "「明日また来ます。」と彼は言った。町長は石橋を建てた。船はカメラを運ぶ。",
    "thai": "นายกเทศมนตรีสร้างสะพานหินหลังจากทำงานเจ็ดปี แม่น้ำไหลผ่านเมือง เด็กเล่นบนฝั่ง",
    "lao": "ເຈົ້າເມືອງສ້າງຂົວຫີນ ແມ່ນ້ຳໄຫຼຜ່ານເມືອງ ເດັກນ້ອຍຫຼິ້ນ",
    "khmer": "អភិបាលក្រុងបានសាងសង់ស្ពានថ្ម។ ទន្លេហូរកាត់ទីក្រុង។ ក្មេងៗលេងនៅមាត់ទន្លេ។",
    "burmese": "မြို့တော်ဝန်သည် ကျောက်တံတားကို တည်ဆောက်ခဲ့သည်။ မြစ်သည် မြို့ကို ဖြတ်သန်းသည်။",
    "tibetan": "རྒྱལ་པོས་ཟམ་པ་བཟོས་སོ།  མི་རྣམས་འཛོམས་སོ། ",
    "long tibetan": "".join(f"གྲོང་ཁྱེར་གྱི་གཙོ་འཛིན་གྱིས་ {y} ལོར་ཟམ་པ་བརྒྱབ།" for y in YEARS),
    "hindi": "नगर प्रमुख ने पत्थर का पुल बनवाया। नदी शहर के बीच से बहती है। बच्चे किनारे पर खेलते हैं।",
    "bengali": "মেয়র একটি পাথরের সেতু নির্মাণ করেন। নদী শহরের মধ্য দিয়ে বয়ে যায়।",
    "tamil": "மேயர் கல் பாலத்தைக் கட்டினார். ஆறு நகரத்தின் வழியாகப் பாய்கிறது அங்கே.",
    "arabic": "بنى العمدة الجسر الحجري بعد سبع سنوات. من بنى الجسر القديم في المدينة؟",
    "urdu": "میئر نے پتھر کا پل بنایا۔ دریا شہر کے بیچ سے گزرتا ہے۔",
    "hebrew": "ראש העיר בנה את גשר האבן. הנהר זורם דרך העיר הישנה.",
    "armenian": "Քաղաքապետը կառուցեց քարե կամուրջը յոթ տարում։ Գետը հոսում է քաղաքի միջով։",
    "georgian": "მერმა ააშენა ქვის ხიდი შვიდ წელიწადში. მდინარე ქალაქის შუაში გადის.",
    "amharic": "ከንቲባው የድንጋይ ድልድይ በሰባት ዓመት ሠራ። ወንዙ በከተማው መሃል ያልፋል ሁልጊዜ።",
    "greek": "Ο δήμαρχος έχτισε τη γέφυρα; Η πέτρινη γέφυρα έγινε σε επτά χρόνια.",
    "russian": "Мэр построил каменный мост после семи лет работы. Река течёт через город.",
    "korean": "시장은 칠 년의 공사 끝에 돌다리를 세웠다. 강은 도시를 지나 흐른다 오늘도.",
    "french": "Le maire fit construire le pont en pierre. La rivière traverse la vieille ville.",
    "a table": "| district | built |\n|---|---|\n"
    + "\n".join(f"| district {y % 40} | {y} |" for y in YEARS),
    "a list": "\n".join(f"- The stone bridge of district {y % 40}: {y}" for y in YEARS),
    "a list of words": "\n".join(["salt", "pepper", "sugar", "flour", "butter", "milk"] * 12),
    "a list of chinese": "\n".join(f"- 第{y % 40}区：石桥，{y}年" for y in YEARS),
    "code": "\n\n".join(f"def step_{y}(x):\n    return x + {y}" for y in YEARS),
    "a poem": "\n".join(f"the river runs past stone {y}\nand no one counts" for y in YEARS),
    "headings": "\n\n".join(f"# Part {y}" for y in YEARS),
    "rows of values": "\n".join(f"{y},{y % 7},{y % 11}" for y in YEARS),
    "one long sentence": "whereas the party of the first part shall deliver the goods, " * 20,
    "values of json": "{" + ",".join(f'"k{y}":{y}' for y in YEARS) + "}",
    "no space": "abcdefghij" * 40,
    "a short text": "The ferry leaves at noon.",
}


@pytest.mark.parametrize("form", TEXTS)
def test_every_kind_gives_turns_of_the_texts_own_words(form: str) -> None:
    text, rng = TEXTS[form], random.Random(1)
    for _ in range(20):
        for kind in ("recite", "continue", "cloze", "paraphrase"):
            turn = text_turn(kind, text, rng)
            assert turn is not None, kind
            start, stop = turn.chars
            assert 0 <= start < stop <= len(text)
            if kind == "cloze":
                assert BLANK in turn.turn
                assert turn.answer in text[start:stop]
            elif kind != "paraphrase":
                assert turn.answer
                assert text[start:stop].endswith(turn.answer)
                assert text[start:stop].removesuffix(turn.answer).strip() in turn.turn
        assert quizzed(text, rng) is not None


def test_a_text_without_letters_has_recitations_alone() -> None:
    rng, text = random.Random(1), "\U0001f600\U0001f30d\U0001f680" * 40
    kinds = ("recite", "continue", "cloze")
    assert [text_turn(kind, text, rng) is not None for kind in kinds] == [True, False, False]


@pytest.mark.parametrize(
    "sentences",
    [
        ["A b. ", "C d! ", "E f? ", "G"],
        ["about 3.5 m, e.g. so"],
        ["a; B"],
        ["他说：“好。”", "然后走了。"],
        ["好！！", "走。"],
        ["是吗?", "是的.", "好"],
        ["वह आया। ", "वह गया॥"],
        ["من؟ ", "نعم. ", "لا"],
        ["Գնաց։ ", "Եկավ: ", "Մնաց"],
        ["ნახა. ", "წავიდა"],
        ["ទៅ។ ", "មក។"],
        ["ሄደ።", "መጣ፧"],
        ["Ποιος; ", "Εγώ. ", "Ναι"],
    ],
)
def test_sentences_end_where_their_script_ends_them(sentences: list[str]) -> None:
    text = "".join(sentences)
    ends = [m.end() for m in SENTENCE_END.finditer(text) if m.end() < len(text)]
    starts = [0, *ends]
    assert [text[a:b] for a, b in zip(starts, [*ends, len(text)], strict=True)] == sentences


def test_a_cue_is_short_where_words_have_no_spaces() -> None:
    for form in ("chinese", "one long chinese sentence", "thai", "khmer", "japanese"):
        cues = {plain_turn(TEXTS[form], "question", random.Random(i)) for i in range(20)}
        assert max(map(len, cues)) < 100


def test_words_of_scripts_with_and_without_spaces() -> None:
    assert words("It's 3 o'clock") == ["It", "s", "3", "o", "clock"]
    assert words("नगर की") == ["नगर", "की"]  # vowel signs belong to a word
    assert words("建于1700年。") == ["建", "于", "1700", "年"]
    assert [*map("建于1700年。".__getitem__, (slice(*s) for s in word_spans("建于1700年。")))] == [
        "建", "于", "1700", "年。",
    ]  # fmt: skip
    assert normalised("कि") != normalised("की")


def test_questions_in_other_scripts_are_questions() -> None:
    for asked in ("谁建了桥？", "من بنى الجسر؟", "Ποιος;", "Who?", "Ո՞վ՞", "ማን፧"):
        assert question_fault(asked, "x") is None
    assert question_fault("谁建了桥。", "x") == "no_question"
    assert question_fault("One; two;", "x") == "no_question"


def test_filters_count_characters_where_words_have_no_spaces() -> None:
    bounds = TextBounds(most_words=20)
    assert fault("谁在北方的城里建了石桥？", "", True, bounds) is None
    assert fault("桥？", "", True, bounds) == "too_short"
    said = "城市在很长的时间里依靠河流运输粮食与木材和盐"  # 22 characters: about 11 words
    assert fault(said, "", True, bounds) is None
    assert fault(said * 2, "", True, bounds) == "too_long"
    assert fault(said[:12], said, True, bounds) == "echo"  # as a whole
    assert fault(said[:12] + "吗？还是不", said, True, bounds) is None


def test_chunks_end_at_the_ends_of_sentences_of_other_scripts() -> None:
    for text, after in (("एक। दो", 4), ("好。”走", 3), ("a. b", 3), ("ہے۔ اب", 4)):
        assert [m.end() for m in BREAKS[1].finditer(text)][:1] == [after]
