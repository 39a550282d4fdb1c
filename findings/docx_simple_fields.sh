#!/usr/bin/env bash
# mammoth 1.13.0: the text of simple fields of a Word document is lost.
#
# Guess: a reader of .docx that keeps "the text of a document" keeps what Word shows: page numbers, dates, cross
# references and captions ("Table 3") are often simple fields (w:fldSimple).
# Seen 2026-11-29: "see ", "Table 3", " below" comes out as "see  below". One of the messages beside the result says
# that the element was ignored, not that it held text. The same field written by its begin and end marks
# (w:fldChar) is kept. Captions and references are what questions ask about.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q mammoth==1.13.0
"$work/venv/bin/python" - <<'PY'
import io, zipfile
import mammoth
W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
run = "<w:r><w:t xml:space='preserve'>{}</w:t></w:r>".format
simple = f"<w:fldSimple w:instr=' REF t3 '>{run('Table 3')}</w:fldSimple>"
mark = "<w:r><w:fldChar w:fldCharType='{}'/></w:r>".format
marked = (mark("begin") + "<w:r><w:instrText> REF t3 </w:instrText></w:r>" + mark("separate")
          + run("Table 3") + mark("end"))
def text(field):
    body = f"<w:document {W}><w:body><w:p>{run('see ')}{field}{run(' below')}</w:p></w:body></w:document>"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("word/document.xml", body)
        archive.writestr("[Content_Types].xml", '<Types xmlns="http://schemas.openxmlformats.org/package/2006/'
            'content-types"><Override PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-'
            'officedocument.wordprocessingml.document.main+xml"/></Types>')
        archive.writestr("_rels/.rels", '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/'
            'relationships"><Relationship Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/'
            'relationships/officeDocument" Target="word/document.xml"/></Relationships>')
    found = mammoth.extract_raw_text(file)
    return found.value.strip(), [m.message for m in found.messages if "fldSimple" in m.message]
one, other = text(simple), text(marked)
print("w:fldSimple:", one, " w:fldChar:", other)
assert one == ("see  below", ["An unrecognised element was ignored: w:fldSimple"])
assert other == ("see Table 3 below", [])
PY
