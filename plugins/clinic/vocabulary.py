"""Define the clinic's vocabulary: fields, the pools of their values, and remarks.

Several fields share each pool, so a field reveals only the kind of its value. The words are chosen
so that the tiny tokenizer encodes each as one token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FieldCategory:
    """Hold fields that share a pool of values, for example ten drug roles and the drug names."""

    name: str
    fields: tuple[str, ...]
    values: tuple[str, ...]


LAB_UNITS: dict[str, str] = {
    "hemoglobin": "gram", "creatinine": "micromol", "sodium": "mmol", "potassium": "mmol",
    "glucose": "mmol", "ferritin": "microgram", "calcium": "mmol", "magnesium": "mmol",
    "albumin": "gram", "bilirubin": "micromol", "lactate": "mmol", "troponin": "nanogram",
    "cholesterol": "mmol", "platelets": "giga", "leukocytes": "giga", "insulin": "units",
    "cortisol": "nanogram", "pulse": "beats", "weight": "kilogram", "saturation": "percent",
}  # fmt: skip

CATEGORIES: tuple[FieldCategory, ...] = (
    FieldCategory("measurement", tuple(LAB_UNITS), tuple(str(n) for n in range(10, 100))),
    FieldCategory(
        "drug",
        ("antihypertensive", "anticoagulant", "analgesic", "antibiotic", "antidepressant",
         "diuretic", "statin", "sedative", "antiemetic", "laxative"),
        ("abilar", "bexotan", "cordel", "dravil", "elmiron", "fenotil", "gavisol", "heptral",
         "iberan", "jentadu", "kelvaris", "lumidol", "mirtazan", "nolvex", "optiram", "pravico",
         "quensyl", "ramiplex", "solvedin", "tavoril", "uromax", "valsaro", "wintomyl", "xelodan",
         "yondelis", "zantor", "brivact", "calmosin", "duratex", "estulic", "foradil", "glivarin"),
    ),
    FieldCategory(
        "person",
        ("surgeon", "cardiologist", "neurologist", "radiologist", "anesthetist", "nurse",
         "therapist", "pharmacist", "referrer", "guardian"),
        ("alvarez", "brandt", "chandra", "duarte", "eriksen", "fontaine", "gruber", "hassan",
         "ivanov", "jensen", "kowalski", "larsen", "moreau", "novak", "okafor", "petrov",
         "quintero", "rossi", "schmidt", "tanaka", "ueda", "vargas", "weber", "xu", "yilmaz",
         "zimmer", "becker", "costa", "dubois", "evans", "fischer", "garcia"),
    ),
    FieldCategory(
        "finding",
        ("ecg", "ultrasound", "biopsy", "endoscopy", "radiograph", "spirometry", "mri",
         "audiogram", "smear", "culture"),
        ("normal", "stenosis", "effusion", "fibrosis", "nodule", "edema", "lesion", "infarct",
         "fracture", "hernia", "polyp", "ulcer", "cyst", "abscess", "thrombus", "dilated",
         "calcified", "atrophy", "embolism", "gastritis", "sterile", "inflamed", "scarring",
         "obstructed", "swelling", "bleeding", "murmur", "arrhythmia", "dysplasia", "carcinoma",
         "adenoma", "sclerosis"),
    ),
    FieldCategory(
        "place",
        ("birthplace", "residence", "pharmacy", "rehabilitation", "transfer"),
        ("ashford", "belmont", "clifton", "dunmore", "eastham", "fairview", "glenwood", "hartley",
         "ironbridge", "kingsley", "lakeside", "milton", "northam", "oakdale", "preston",
         "queensbury", "ridgeway", "southend", "thornton", "upton", "westbrook", "yarmouth"),
    ),
)  # fmt: skip

CATEGORY_OF: dict[str, FieldCategory] = {f: c for c in CATEGORIES for f in c.fields}
FIELDS: tuple[str, ...] = tuple(CATEGORY_OF)

# More remarks than a chart has facts, so that none occurs twice in a chart. No two begin or end
# with the same word: where several words can follow one, only words further back decide, and a tiny
# model could not recite such remarks.
REMARKS: tuple[str, ...] = (
    "patient slept well", "diet was tolerated", "family was informed", "wound is clean and dry",
    "mobility is improving slowly", "plan was discussed at length", "infection was ruled out",
    "pain is controlled", "fluids were encouraged", "follow up was arranged",
    "consent was obtained", "skin is warm", "questions were answered", "appetite has returned",
    "night was quiet", "dressing was changed", "lungs are clear", "spirits are good",
    "sutures were removed", "gait is steady", "mood is stable", "allergies were reviewed",
    "discharge is planned", "breathing is easy", "visitors came today", "sleep has improved",
    "bowels moved regularly", "vitals remain unchanged", "catheter stays in place",
    "reflexes are brisk", "teeth need care", "hearing is adequate", "vision tested fine",
    "posture looks relaxed",
)  # fmt: skip

FIRST_NAMES: tuple[str, ...] = (
    "anna", "boris", "clara", "david", "elena", "felix", "greta", "henry", "ines", "jonas",
    "karin", "louis", "maria", "nina", "oscar", "paula", "ruben", "sofia", "tomas", "vera",
)  # fmt: skip
MONTHS: tuple[str, ...] = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december",
)  # fmt: skip
DEPARTMENTS: tuple[str, ...] = (
    "cardiology", "neurology", "oncology", "surgery", "radiology", "urology", "geriatrics",
    "admissions",
)  # fmt: skip
DIAGNOSES: tuple[str, ...] = (
    "pneumonia", "diabetes", "hypertension", "lymphoma", "epilepsy", "asthma", "nephritis",
    "hepatitis", "arthritis", "anemia",
)  # fmt: skip


def value_text(field: str, value: str) -> str:
    """Return the value with its field's unit, if it has one (`"41 gram"`)."""
    unit = LAB_UNITS.get(field)
    return f"{value} {unit}" if unit else value
