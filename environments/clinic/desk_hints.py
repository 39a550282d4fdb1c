"""Hold the hint templates of the desk by `DeskReply.hint_key`; `hint_facts` fill them in."""

HINTS = {
    "tools": "the tools are find read answer.",
    "form_of_find": "say find {field} in a department.",
    "form_of_read": "say read note and its number.",
    "form_of_answer": "say answer and the value.",
    "where": "the handbook says {field} {department}.",
    "the_note": "read note {note}.",
    "find_first": "find {field} first.",
}
