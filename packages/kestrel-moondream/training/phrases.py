"""The language of the nano model: colours, nouns, question wordings and answers, as plain strings.

``tokenizer`` learns its merges from these strings and ``pieces`` turns them into token tables.
"""

from __future__ import annotations

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (222, 32, 38),
    "green": (38, 158, 58),
    "blue": (38, 78, 218),
    "yellow": (246, 218, 36),
    "orange": (246, 132, 18),
    "purple": (132, 46, 176),
    "pink": (250, 128, 188),
    "brown": (122, 72, 34),
    "black": (18, 18, 20),
    "white": (246, 246, 246),
    "gray": (132, 132, 134),
}
COLOR_NAMES = list(COLORS)
SHAPES = ["circle", "square", "triangle", "star", "cross", "diamond", "heart", "ring"]
KINDS = [*SHAPES, "bar", "word", "number"]
BAR, WORD, NUMBER = len(SHAPES), len(SHAPES) + 1, len(SHAPES) + 2
GENERIC = ["shape", "object", "thing"]
POSITIONS = [
    "top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right",
]  # fmt: skip
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"

WORDS = (
    "cat dog sun sea sky red one two six ten top cup box car bus map key hat pen bag bed egg fox ice jam leg net oil "
    "pig row tea van web zoo arm bee cow day ear fan gas hen ink joy kid lip mud nut owl pot rat sky toy use win yes "
    "open stop left door fish bird tree star moon wind rain snow ship road book game fire gold hill jazz king lamp "
    "milk nest park quiz rock salt time unit vote wave yard zero blue cake desk east frog girl hand idea jump kite "
    "lion mark nose oven pink rice soap taxi view wolf year zone apple bread chair dream eagle flour grape house "
    "input juice knife lemon mouse night ocean piano queen river salad table uncle voice water exit push pull sale"
).split()

# Slots: {many} plural; {the} definite singular; {a} indefinite singular; {one} singular; {is} colour alone.
QUESTIONS: dict[str, list[str]] = {
    "count": [
        "How many {many} are there", "How many {many} are in the picture", "How many {many} are in the image",
        "How many {many} do you see", "How many {many} can you see", "How many {many}", "Count the {many}",
        "What is the number of {many}", "How many {many} are shown", "How many {many} are visible",
        "How many {many} does the picture show",
    ],
    "color": [
        "What color is {the}", "What colour is {the}", "What is the color of {the}",
        "What is the colour of {the}", "Which color is {the}", "Which colour is {the}",
        "What color does {the} have", "Tell me the color of {the}", "Name the color of {the}",
        "What color is {the} in the picture",
    ],
    "shape": [
        "What shape is {the}", "What is the shape of {the}", "What kind of shape is {the}", "Which shape is {is}",
        "What shape is {is}", "What is {the}",
    ],
    "exists": [
        "Is there {a}", "Is there {a} in the picture", "Is there {a} in the image", "Do you see {a}",
        "Can you see {a}", "Does the picture show {a}", "Does the image contain {a}", "Are there any {many}",
        "Is {a} visible", "Is {a} in the picture", "Are there {many} in the image",
    ],
    "left": ["Is {the} left of {the}", "Is {the} to the left of {the}", "Is {the} on the left of {the}"],
    "right": ["Is {the} right of {the}", "Is {the} to the right of {the}", "Is {the} on the right of {the}"],
    "above": ["Is {the} above {the}", "Is {the} higher than {the}", "Is {the} over {the}"],
    "below": ["Is {the} below {the}", "Is {the} lower than {the}", "Is {the} under {the}"],
    "word": [
        "What word is written", "What word is this", "What does the word say", "Read the word", "What is the word",
        "Which word is shown", "What word is shown", "What word do you see", "What word can you read",
        "What word is in the picture", "What word is written in the image", "Which word is written",
    ],
    "number": [
        "What number is shown", "What number is written", "What is the number", "Which number is shown",
        "What number do you see", "Read the number", "What number is in the picture", "What number is this",
        "What number can you read", "Which number is written in the image",
    ],
    "text": [
        "What is written", "What does the text say", "Read the text", "What text is shown", "What does it say",
        "What is written in the picture",
    ],
    "largest": [
        "Which bar is tallest", "Which bar is the tallest", "Which bar is largest", "Which bar is the largest",
        "Which bar is the biggest", "Which bar is highest", "Which bar is the highest", "What is the tallest bar",
        "Which is the largest bar", "Which bar is the longest", "Name the tallest bar", "Which bar is biggest",
    ],
    "smallest": [
        "Which bar is shortest", "Which bar is the shortest", "Which bar is smallest", "Which bar is the smallest",
        "Which bar is lowest", "What is the shortest bar", "Which is the smallest bar", "Which bar is the lowest",
    ],
    "largest_color": [
        "What color is the tallest bar", "What colour is the tallest bar", "What color is the largest bar",
        "What colour is the largest bar", "What is the color of the tallest bar",
    ],
    "smallest_color": [
        "What color is the shortest bar", "What colour is the shortest bar", "What color is the smallest bar",
        "What colour is the smallest bar",
    ],
    "bar_label": ["Which bar is {is}", "What is the label of {the}", "What letter is under {the}"],
    "where": ["Where is {the}", "Where is {the} in the picture", "Where do you see {the}", "Where can you see {the}"],
    "here": ["What is here", "What is this", "What object is this", "What is at this place", "What do you see here"],
    "here_color": ["What color is this", "What colour is this", "What color is it", "What is the color of this"],
    "here_shape": ["What shape is this", "What shape is it", "Which shape is this", "What is the shape of this"],
}  # fmt: skip
QUESTION_NAMES = list(QUESTIONS)
# Sampling weight of each kind of question; a kind counts only where the scene allows it unambiguously.
QUESTION_WEIGHTS: dict[str, float] = {
    "count": 2.6, "color": 2.4, "shape": 1.0, "exists": 1.5, "left": 0.5, "right": 0.5, "above": 0.5, "below": 0.5,
    "word": 1.3, "number": 1.0, "text": 0.5, "largest": 2.5, "smallest": 1.2, "largest_color": 0.9,
    "smallest_color": 0.6, "bar_label": 0.6, "where": 0.5, "here": 0.35, "here_color": 0.35, "here_shape": 0.3,
}  # fmt: skip

COUNT_WORDS = ["a", "an", "two", "three", "four", "five", "six", "seven", "eight", "the"]
# (style, is_chart) -> opening of a caption; "" means that the first item opens the sentence.
CAPTION_OPENINGS = {
    ("short", False): "", ("short", True): "A bar chart with", ("normal", False): "The picture shows",
    ("normal", True): "The picture shows a bar chart with", ("long", False): "There is",
    ("long", True): "There is a bar chart with",
}  # fmt: skip
REASONING = {"open": "I see", "none": "I see no", "close": "."}
SKILLS = ["query", "describe", "short", "normal", "long", "detect", "point"]


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def surface_forms(template: str) -> list[str]:
    """The wordings of one template: with and without capital and closing mark."""
    mark = "." if template.split()[0] in {"Count", "Read", "Name", "Tell"} else "?"
    lower = template[0].lower() + template[1:]
    return [template + mark, template + mark, lower + mark, template, lower]
