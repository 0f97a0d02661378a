"""Generates a stream of prompts unlike the shipped drafter's training data: other natural languages, JSON, tables, summaries.

Prompts are generated from the templates below and a seed; nothing is copied from a data set. They do not repeat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

GERMAN_TOPICS = [
    *(
        "den Wald",
        "das Meer",
        "die Küche",
        "den Bahnhof",
        "das Fahrrad",
        "den Winter",
        "die Schule",
        "den Garten",
        "das Wetter",
    ),
    *("die Stadt", "den Markt", "die Musik", "das Dorf", "den Fluss", "die Bibliothek", "das Brot", "den Urlaub", "die Arbeit"),
    *("den Mond", "die Katze", "das Theater", "den Kaffee", "die Brücke", "das Handwerk", "den Verkehr", "die Post"),
]
GERMAN_TASKS = [
    "Schreibe drei Sätze über {topic}.",
    "Erkläre einem Kind {topic} in einfachen Worten.",
    "Nenne {number} Dinge, die man über {topic} wissen sollte.",
    "Schreibe einen kurzen Brief an {name} über {topic}.",
    "Was denkt {name} über {topic}? Antworte in zwei Sätzen.",
    "Schreibe ein Gespräch zwischen {name} und {other} über {topic}.",
    "Vergleiche {topic} heute mit {topic} vor {number}0 Jahren.",
]
SPANISH_TOPICS = [
    *("el mar", "la montaña", "la cocina", "el tren", "el invierno", "la escuela", "el jardín", "el tiempo", "la ciudad"),
    *("el mercado", "la música", "el pueblo", "el río", "la biblioteca", "el pan", "las vacaciones", "el trabajo", "la luna"),
    *("el teatro", "el café", "el puente", "la lluvia", "el camino", "la feria", "el puerto", "la huerta"),
]
SPANISH_TASKS = [
    "Escribe tres frases sobre {topic}.",
    "Explica {topic} a un niño con palabras sencillas.",
    "Di {number} cosas que hay que saber sobre {topic}.",
    "Escribe una carta corta a {name} sobre {topic}.",
    "¿Qué piensa {name} sobre {topic}? Responde en dos frases.",
    "Escribe una conversación entre {name} y {other} sobre {topic}.",
    "Cuenta una historia breve de {name} en la que aparezca {topic}.",
]
FRENCH_TOPICS = [
    *(
        "la mer",
        "la montagne",
        "la cuisine",
        "le train",
        "l'hiver",
        "l'école",
        "le jardin",
        "la météo",
        "la ville",
        "le marché",
    ),
    *("la musique", "le village", "la rivière", "la bibliothèque", "le pain", "les vacances", "le travail", "la lune"),
    *("le théâtre", "le café", "le pont", "la pluie", "le chemin", "le port", "la forêt", "le vélo"),
]
FRENCH_TASKS = [
    "Écris trois phrases sur {topic}.",
    "Explique {topic} à un enfant avec des mots simples.",
    "Donne {number} choses à savoir sur {topic}.",
    "Écris une courte lettre à {name} sur {topic}.",
    "Que pense {name} de {topic} ? Réponds en deux phrases.",
    "Écris une conversation entre {name} et {other} sur {topic}.",
    "Raconte une courte histoire de {name} avec {topic}.",
]
NAMES = [
    *("Anna", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Karla", "Leo", "Marta", "Nils"),
    *("Olga", "Paul", "Rosa", "Simon", "Tilda", "Vera", "Wanda", "Yann"),
]
CITIES = ["Lund", "Porto", "Graz", "Turin", "Delft", "Kiel", "Ghent", "Bern", "Cork", "Brno", "Riga", "Vigo", "Lyon", "Bergen"]
GOODS = ["lamps", "chairs", "bicycles", "kettles", "tents", "clocks", "boots", "radios", "shelves", "drills", "mugs", "scarves"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October"]
TRADES = ["baker", "nurse", "carpenter", "pilot", "teacher", "gardener", "plumber", "librarian", "cook", "surveyor"]


def _in_words(draw: random.Random, topics: list[str], tasks: list[str]) -> str:
    name, other = draw.sample(NAMES, 2)
    first, second = draw.sample(topics, 2)
    text = draw.choice(tasks).format(topic=first, name=name, other=other, number=draw.randint(2, 9))
    again = draw.choice(tasks).format(topic=second, name=other, other=name, number=draw.randint(2, 9))
    return text if draw.random() < 0.3 else f"{text} {again}"


def _person(draw: random.Random) -> str:
    return (
        f"{draw.choice(NAMES)} is {draw.randint(18, 80)} years old, works as a {draw.choice(TRADES)} in {draw.choice(CITIES)} "
        f"and has {draw.randint(2, 9)} {draw.choice(GOODS)}."
    )


def _json(draw: random.Random) -> str:
    people = " ".join(_person(draw) for _ in range(draw.randint(2, 4)))
    return f"Extract a JSON list with the keys name, age, job, city and items. Answer with JSON only.\n\n{people}"


def _table(draw: random.Random) -> str:
    rows = "; ".join(
        f"{draw.choice(CITIES)} sold {draw.randint(10, 999)} {draw.choice(GOODS)} in {draw.choice(MONTHS)}"
        for _ in range(draw.randint(3, 6))
    )
    return f"Write this as a Markdown table with the columns city, number, goods and month: {rows}."


def _summary(draw: random.Random) -> str:
    city, goods = draw.choice(CITIES), draw.choice(GOODS)
    sentences = [
        f"The {goods} works in {city} was founded in {draw.randint(1850, 1990)} by a {draw.choice(TRADES)}.",
        f"It has {draw.randint(12, 900)} workers and ships {goods} to {draw.choice(CITIES)} and {draw.choice(CITIES)}.",
        f"In {draw.choice(MONTHS)} a fire destroyed {draw.randint(2, 9)} of its halls.",
        f"{draw.choice(NAMES)}, who runs it, wants to rebuild them by {draw.choice(MONTHS)}.",
        f"The town gives {draw.randint(1, 9)} million, and the bank as much again.",
    ]
    return f"Summarise in one sentence: {' '.join(draw.sample(sentences, draw.randint(3, 5)))}"


def _translation(draw: random.Random) -> str:
    name, other = draw.sample(NAMES, 2)
    sentences = [
        f"{name} bought {draw.randint(2, 99)} {draw.choice(GOODS)} in {draw.choice(CITIES)} in {draw.choice(MONTHS)}.",
        f"The {draw.choice(TRADES)} from {draw.choice(CITIES)} wrote a letter to {other}.",
        f"{other} works as a {draw.choice(TRADES)} and wants to move to {draw.choice(CITIES)}.",
        f"The shop sold its last {draw.choice(GOODS)} to {name} and closed for the winter.",
        f"In {draw.choice(MONTHS)} the train to {draw.choice(CITIES)} was {draw.randint(5, 55)} minutes late.",
        f"{name} and {other} repaired the old {draw.choice(GOODS)} of the {draw.choice(TRADES)}.",
    ]
    language = draw.choice(["Spanish", "French", "German", "Italian"])
    return f"Translate into {language}: {' '.join(draw.sample(sentences, draw.randint(2, 4)))}"


def _actions(draw: random.Random) -> str:
    lines = [
        f"{draw.choice(NAMES)} will {draw.choice(['order', 'repair', 'count', 'paint', 'sell', 'move'])} {draw.randint(2, 40)} "
        f"{draw.choice(GOODS)} by {draw.choice(MONTHS)} {draw.randint(1, 28)}, if the {draw.choice(TRADES)} in "
        f"{draw.choice(CITIES)} agrees."
        for _ in range(draw.randint(2, 4))
    ]
    return f"Turn these notes into one line each, as `who: what (when)`:\n\n{' '.join(lines)}"


KINDS: dict[str, Callable[[random.Random], str]] = {
    "german": lambda draw: _in_words(draw, GERMAN_TOPICS, GERMAN_TASKS),
    "spanish": lambda draw: _in_words(draw, SPANISH_TOPICS, SPANISH_TASKS),
    "french": lambda draw: _in_words(draw, FRENCH_TOPICS, FRENCH_TASKS),
    "json": _json,
    "table": _table,
    "summary": _summary,
    "translation": _translation,
    "actions": _actions,
}


def prompts(kinds: list[str], seed: int = 0) -> Iterator[str]:
    """Yields an endless stream of different prompts of randomly chosen kinds."""
    draw, seen = random.Random(seed), set()
    while True:
        text = KINDS[draw.choice(kinds)](draw)
        if text not in seen:
            seen.add(text)
            yield text
