"""The built-in data set: prompts written for this project, over the eleven categories of SPEED-Bench."""

from __future__ import annotations

from fledge.bench.datasets import Item

_PASSAGES = (
    "[1] The Tallow bridge was opened in 1934 and carries two lanes of traffic and a footpath over the Orra.\n"
    "[2] In the flood of 1968 the eastern pier sank by eleven centimetres; the bridge was closed for five months.\n"
    "[3] Since 2009 lorries above 18 tonnes must use the motorway bridge, four kilometres downstream.",
    "Manual, section 4. To reset the pump, hold the green key for six seconds until the lamp blinks twice. If the lamp stays "
    "red, the filter is blocked: switch off the power, unscrew the cap, rinse the filter in warm water and put it back dry.\n"
    "Manual, section 7. The pump must not run dry for more than one minute.",
)

_ARTICLE = (
    "The village of Ansel had no school for nine years after the old one burned down. Children walked over the hill to Brecht, "
    "an hour each way, and in the snow months many stayed at home. Last spring a retired carpenter offered his workshop, "
    "parents cleared it out in a weekend, and the county agreed to pay one teacher. In September twenty-three pupils sat down "
    "at benches that still smell of pine. The county will decide next year whether the school may stay."
)


def _items(category: str, *conversations: tuple[str, ...]) -> list[Item]:
    return [Item(f"{category}-{number}", category, turns) for number, turns in enumerate(conversations, 1)]


BUILT_IN: tuple[Item, ...] = (
    *_items(
        "coding",
        ("Write a Python function that returns the longest word in a sentence, and two examples of its use.",),
        (
            "Write a small Python class for a bank account with deposit, withdraw and a readable string form.",
            "Now make withdraw raise an error when the balance is too low, and show the whole class again.",
        ),
        ("Explain what this line does and rewrite it as a loop: `squares = {n: n * n for n in range(10) if n % 2}`",),
    ),
    *_items(
        "math",
        ("A train leaves at 9:40 and arrives at 13:05. How long is the journey? Show each step.",),
        ("A rectangle is three times as long as it is wide and its perimeter is 64 cm. Find its area, step by step.",),
    ),
    *_items(
        "humanities",
        ("Why did medieval towns build walls, and why did later towns pull them down?",),
        ("What is the difference between a moral rule and a law? Give an example of each.",),
    ),
    *_items(
        "stem",
        ("Explain how a refrigerator moves heat from a cold place to a warm one.",),
        ("What happens inside a leaf during photosynthesis? List the main steps.",),
    ),
    *_items(
        "writing",
        ("Write a short letter to a neighbour, asking whether you may borrow a ladder for the weekend.",),
        (
            "Write the first paragraph of a story that begins in an empty railway station at night.",
            "Continue with a second paragraph in which someone arrives.",
        ),
    ),
    *_items(
        "summarization",
        (f"Summarise this article in two sentences.\n\n{_ARTICLE}",),
        (f"Turn this article into four bullet points.\n\n{_ARTICLE}",),
    ),
    *_items(
        "roleplay",
        ("You are the captain of a small ship in a storm. Speak to your crew.",),
        ("Play a museum guide who shows me an old printing press. Begin the tour.",),
    ),
    *_items(
        "rag",
        (f"{_PASSAGES[0]}\n\nUsing only the passages above, say why lorries may not use the Tallow bridge, and since when.",),
        (f"{_PASSAGES[1]}\n\nUsing only the manual above: the lamp stays red. What do I do?",),
    ),
    *_items(
        "multilingual",
        ("Traduis en anglais : « Le marché ouvre à sept heures, mais les boulangers arrivent bien avant l'aube. »",),
        ("Nenne drei Gründe, warum viele Menschen gern mit dem Fahrrad zur Arbeit fahren.",),
        ("Escribe una receta sencilla de sopa de verduras con una lista de ingredientes.",),
    ),
    *_items(
        "reasoning",
        ("Anna is older than Ben. Carl is younger than Ben. Dora is older than Anna. Who is the second oldest? Explain.",),
        ("A box holds red and blue balls only. If you must draw four to be sure of two of one colour, is that true? Explain.",),
    ),
    *_items(
        "qa",
        ("What is the capital of Australia, and why was it not Sydney?",),
        ("How many sides does a hexagon have, and where do hexagons occur in nature?",),
    ),
)
