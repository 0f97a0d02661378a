"""Prints figures as soon as they are measured, for `gpu.py`."""

from __future__ import annotations


def shown(name: str, figures: dict[str, object]) -> dict[str, object]:
    """Prints figures at once, so that an aborted run has printed what it measured; returns them."""
    print(f"  {name:>24}  " + "  ".join(f"{k} {brief(v)}" for k, v in figures.items()), flush=True)
    return figures


def show(title: str, figures: dict[str, object]) -> None:
    print(f"\n== {title}")
    for name, value in figures.items():
        if isinstance(value, dict) and "kernels" in value:
            print(f"  {name}: " + ", ".join(f"{k} {brief(v)}" for k, v in value.items() if k != "kernels"))
            for kernel, times in value["kernels"].items():
                print(f"      {times['us']:9.1f} us  x{times['launches']:6.1f}  {kernel}")
        elif isinstance(value, dict):
            shown(name, value)
        else:
            print(f"  {name:>24}  {brief(value)}")


def brief(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
