"""`fledge models`: lists the built-in names of models and drafters."""

from __future__ import annotations

from fledge.cli import options


def models(as_json: options.Json = False) -> None:
    """List the built-in models and drafters, and what else --model and --drafter accept."""
    from rich.console import Console
    from rich.table import Table

    from fledge import drafters, sources
    from fledge.families import FAMILIES

    listed = sources.list_models()
    shipped = {folder.name: drafters.trained_on(folder) for folder in drafters.shipped()}
    if as_json:
        options.print_json({"models": [dict(vars(entry)) for entry in listed], "drafters": [*shipped, "ngram"]})
        return
    console = Console()
    table = Table(title="built-in models")
    for heading in ("name", "what it is", "licence", "size", "cached"):
        table.add_column(heading)
    for entry in listed:
        size = f"{entry.download_bytes / 1e6:.0f} MB"
        table.add_row(entry.name, entry.description, entry.licence, size, "yes" if entry.cached else "no")
    console.print(table)
    for name, trained in shipped.items():
        console.print(f"drafter {name}: {trained}")
    console.print("drafter ngram: proposes what followed the same tokens earlier in the text; needs no training")
    console.print(
        "--model also takes a Hugging Face folder, a GGUF file, or a hub id (org/name); --drafter a folder or a hub id.\n"
        f"Model families: {', '.join(family.name for family in FAMILIES.values())}."
    )
