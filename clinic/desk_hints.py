"""What a hint says at the clinic desk, by the `hint_key` of the failure; facts fill the braces."""

HINTS = {
    "where": "the handbook says {field} {department}.",
    "tools": "the tools are find read answer.",
    "form_of_find": "say find {field} in a department.",
    "form_of_read": "say read note and its number.",
    "form_of_answer": "say answer and the value.",
    "the_note": "read note {note}.",
    "find_first": "find {field} first.",
}
