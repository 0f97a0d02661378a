"""The demo's prompts, written for this project: categories in which drafting is easy, and others in which it is hard."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    category: str
    text: str


DEMO = (
    Prompt("code", "Write a Python function that checks if a number is prime, with a short docstring."),
    Prompt("maths", "A baker makes 12 trays of 8 rolls and sells 70 rolls. How many rolls are left? Show your steps."),
    Prompt("chat", "I have a free Saturday and it is raining. Suggest five things I could do at home."),
    Prompt(
        "summary",
        "Summarise in two sentences: The lighthouse at Harrow Point was built in 1871 after three ships were lost in one "
        "winter. Its keeper lived there with his family until the lamp was made automatic in 1963. Today the tower is a small "
        "museum, and volunteers open it on Sundays so that visitors can climb the 112 steps and look out over the bay.",
    ),
    Prompt(
        "editing",
        "Correct the spelling and return the whole text: Teh river runs thru the old town and past teh mill. In sumer the "
        "children swim below the brige, and in winter the river freezes so hard that peple skate to the next vilage.",
    ),
    Prompt("knowledge", "Explain why the sky is blue in words that a ten-year-old understands."),
    Prompt("writing", "Write the opening of a story about a clockmaker who finds a clock that runs backwards."),
    Prompt("extraction", "List the name, age and city as JSON: Maria is 34 and lives in Lisbon; Tom, 27, lives in Oslo."),
)
