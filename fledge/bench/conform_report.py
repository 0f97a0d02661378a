"""Reports of a conformance run: a terminal table, Markdown, JSON, and a self-contained HTML file."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fledge.bench.conform import CHECKS, FAIL, NOT_SUPPORTED, PASS, SPECULATION, ConformReport, Row
from fledge.bench.provenance import write_json
from fledge.errors import UserError, printable
from fledge.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

MARKS = {PASS: "✓", FAIL: "✗", NOT_SUPPORTED: "–"}
STYLES = {PASS: "green", FAIL: "bold red", NOT_SUPPORTED: "dim"}
CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } .dim { color: #666 }
table { border-collapse: collapse; font-size: .9em; margin: .6rem 0 }
th, td { padding: .25rem .7rem; text-align: left; vertical-align: top }
th { border-bottom: 1px solid #999 } tr:nth-child(even) td { background: #f6f6f4 } td.mark { text-align: center }
.pass { color: #2e6b1f } .fail { color: #b3261e; font-weight: 600 } .not { color: #888 }
code { font-size: .95em; overflow-wrap: anywhere }
"""


def matrix(report: ConformReport) -> list[tuple[str, list[Row | None]]]:
    """One line per scenario: its row for each of `CHECKS`, None if that check was not run."""
    by_place = {(row.scenario, row.check): row for row in report.rows}
    names = dict.fromkeys(row.scenario for row in report.rows if row.scenario != SPECULATION)
    return [(name, [by_place.get((name, check)) for check in CHECKS]) for name in names]


def headline(report: ConformReport) -> str:
    verdict = "passed" if report.passed else "failed"
    counts = ", ".join(f"{report.count(status)} {status}" for status in (PASS, FAIL, NOT_SUPPORTED))
    return f"{verdict}: {counts} ({report.seconds:.0f} s)"


def details(report: ConformReport, status: str) -> list[tuple[str, str]]:
    """Place and reason of every row with this status."""
    return [
        (f"{row.scenario}, {row.check}", printable(row.reason + (f" ({row.difference})" if row.difference else "")))
        for row in report.rows
        if row.status == status
    ]


def speculation(report: ConformReport) -> str:
    return next((f"{row.status}: {row.reason}" for row in report.rows if row.scenario == SPECULATION), "")


def print_report(report: ConformReport, console: Console) -> None:
    from rich.markup import escape as literal
    from rich.table import Table

    table = Table(title=literal(printable(f"{report.url}, {report.model} {report.version}".strip())))
    table.add_column("scenario")
    for check in CHECKS:
        table.add_column(check, justify="center")
    for name, rows in matrix(report):
        table.add_row(name, *(f"[{STYLES[row.status]}]{MARKS[row.status]}[/]" if row else "" for row in rows))
    console.print(table)
    console.print(literal(f"without speculation: {printable(report.reference)}"), highlight=False)
    console.print(literal(f"speculation at work: {printable(speculation(report))}"), highlight=False)
    for status, title in ((FAIL, "failed"), (NOT_SUPPORTED, "not supported")):
        for place, reason in details(report, status):
            console.print(f"[{STYLES[status]}]{title}[/] [bold]{literal(place)}[/]: {literal(reason)}", highlight=False)
    console.print(f"[{'green' if report.passed else 'bold red'}]{literal(headline(report))}[/]", highlight=False)


def write_report(report: ConformReport, path: Path) -> None:
    """Writes the report in the format of the file's suffix: .json, .html or .md."""
    check_suffix(path)
    if path.suffix == ".json":
        write_json(path, report.to_dict())
        return
    text = html(report) if path.suffix == ".html" else markdown(report)
    write_atomically(path, lambda file: file.write(text.encode()))


def check_suffix(path: Path) -> None:
    if path.suffix not in (".json", ".html", ".md"):
        raise UserError(f"--out {path}: the file must end in .json, .html or .md")


def markdown(report: ConformReport) -> str:
    lines = [
        f"**{headline(report)}**",
        "",
        f"- server: {_code(report.url)}, model {_code(report.model)}, version {_code(report.version) or '?'}",
    ]
    lines += [f"- without speculation: {_code(report.reference)}", f"- speculation at work: {speculation(report)}", ""]
    lines += ["| scenario | " + " | ".join(CHECKS) + " |", "|:---|" + ":---:|" * len(CHECKS)]
    lines += [
        f"| {name} | " + " | ".join(MARKS[row.status] if row else " " for row in rows) + " |" for name, rows in matrix(report)
    ]
    for status, title in ((FAIL, "Failed"), (NOT_SUPPORTED, "Not supported")):
        found = details(report, status)
        if found:
            lines += ["", f"{title}:", ""]
            lines += [f"- *{place}*: {_code(reason)}" for place, reason in found]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """A server's text as Markdown code, so that nothing in it is read as markup."""
    return "`" + printable(text).replace("`", "'").strip() + "`" if text.strip() else ""


def html(report: ConformReport) -> str:
    kinds = {PASS: "pass", FAIL: "fail", NOT_SUPPORTED: "not"}

    def cell(row: Row | None) -> str:
        if row is None:
            return "<td class=mark></td>"
        return f'<td class="mark {kinds[row.status]}" title="{escape(printable(row.reason))}">{MARKS[row.status]}</td>'

    heads = "".join(f"<th>{escape(check)}</th>" for check in ("scenario", *CHECKS))
    lines = "".join(f"<tr><td>{escape(name)}</td>{''.join(map(cell, rows))}</tr>" for name, rows in matrix(report))
    parts = [
        f"<h1>Conformance: {escape(report.model)}</h1>",
        f"<p class={'pass' if report.passed else 'fail'}>{escape(headline(report))}</p>",
        f"<p>Server: <code>{escape(report.url)}</code> {escape(report.version)}<br>Without speculation: "
        f"{escape(report.reference)}<br>Speculation at work: {escape(speculation(report))}</p>",
        f"<table><tr>{heads}</tr>{lines}</table>",
        "<p class=dim>✓ pass · ✗ fail · – not supported · empty: not run</p>",
    ]
    for status, title in ((FAIL, "Failed"), (NOT_SUPPORTED, "Not supported")):
        found = details(report, status)
        if found:
            items = "".join(f"<tr><td>{escape(place)}</td><td><code>{escape(why)}</code></td></tr>" for place, why in found)
            parts.append(f"<h2>{title}</h2><table>{items}</table>")
    facts = {**{name: str(value) for name, value in report.settings.items()}, **report.about}
    rows = "".join(f"<tr><td>{escape(name)}</td><td><code>{escape(value)}</code></td></tr>" for name, value in facts.items())
    parts.append(f"<h2>How it was run</h2><table>{rows}</table>")
    body = "\n".join(parts)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Conformance: {escape(report.model)}</title>"
        f"<style>{CSS}</style><body>{body}</body></html>\n"
    )
