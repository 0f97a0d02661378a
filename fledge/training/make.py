"""A drafter for a model in one command: answers, training, checks, card. Each part continues where it was ended.

make.json        settings, seconds spent, parts done
answers.jsonl    what the target answered (grows line by line)
data/            the same, split into training and held-out conversations
recipe.yaml      of the training, whose folder is run/
drafter/         what came of it, with a model card
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge import progress as progress_bars
from fledge import sources
from fledge.bench.doctor import Diagnosis, diagnose
from fledge.checkpoints.ends import fetch_ends
from fledge.checkpoints.export import launch_commands
from fledge.devices import resolve_device
from fledge.errors import UserError
from fledge.files import copy_folder, write_atomically
from fledge.tokenizer import Tokenizer
from fledge.training import toy
from fledge.training.context import resolve
from fledge.training.datagen.prompts import read_prompts
from fledge.training.datagen.regenerate import AnswerGenerator, PromptsExhausted, regenerate
from fledge.training.distributed import DistributedContext
from fledge.training.make_plan import MakePlan
from fledge.training.recipe import Recipe, build_recipe, load_recipe
from fledge.training.robustness import Retention, robustness
from fledge.training.targets.endpoint import EndpointAnswers
from fledge.training.targets.loading import target_shape
from fledge.training.targets.states_client import StatesClient, launch_command
from fledge.training.trainer import TrainingStopped, train

MAX_PROMPTS = 1_000_000
ENDPOINT_REQUESTS = 64
NUM_DRAFT_TOKENS = 3  # in the commands at the end

Say = Callable[[str], None]


class Interrupted(UserError):
    """Ended on the user's wish; the same command continues."""


@dataclass
class Progress:
    """What is done, on disk."""

    path: Path
    settings: dict[str, Any]
    answer_seconds: float = 0.0
    done: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path, settings: dict[str, Any]) -> Progress:
        if not path.is_file():
            return cls(path, settings)
        found = json.loads(path.read_text())
        for name, value in settings.items():
            if found["settings"].get(name) != value:
                raise UserError(
                    f"{path.parent}: was begun with {name} {found['settings'].get(name)!r}, now it is {value!r}; name another "
                    "output folder, or use the same settings"
                )
        return cls(path, settings, found["answer_seconds"], tuple(found["done"]))

    def save(self) -> None:
        record = {"settings": self.settings, "answer_seconds": self.answer_seconds, "done": list(self.done)}
        write_atomically(self.path, lambda file: file.write(json.dumps(record, indent=2).encode() + b"\n"))

    def finish(self, part: str) -> None:
        self.done = (*self.done, part)
        self.save()


@dataclass(frozen=True)
class Made:
    folder: Path
    acceptance_length: dict[str, float]  # by depth, on held-out prompts
    healthy: bool | None  # as `fledge doctor` says; None: not asked, as the target runs elsewhere
    robustness: list[Retention]
    commands: dict[str, str]


def make(
    model: str,
    out: Path,
    *,
    hours: float = 1.0,
    prompts: Path | None = None,
    endpoint: str | None = None,
    endpoint_states: str | None = None,
    device: str = "auto",
    say: Say = print,
) -> Made | None:
    """None: in the processes of torchrun that are not the first."""
    place = resolve_device(device)
    world = DistributedContext.join(use_cuda=place.type == "cuda")
    settings = {"model": model, "prompts": None if prompts is None else str(prompts), "endpoint": endpoint}
    progress = world.on_first(lambda: Progress.load(out / "make.json", settings))
    if model == "toy":
        model = str(world.on_first(lambda: toy.make(out / "toy", num_answers=1)) / "target")

    def prepare() -> tuple[MakePlan, dict[str, Any]]:
        folder = fetch_ends(model) if endpoint else sources.resolve(model)
        shape, _ = target_shape(folder)
        tokenizer = Tokenizer(folder)
        plan = MakePlan.of(model, shape, tokenizer, place, hours, prompts, endpoint, endpoint_states)
        say(f"the plan, for {hours:g} hours:\n{plan.describe()}")
        out.mkdir(parents=True, exist_ok=True)
        progress.save()
        if "answers" not in progress.done:
            _answer(plan, shape, tokenizer, out, progress, say)
        return plan, _recipe(plan, out, progress, say).to_dict()

    plan, content = world.on_first(prepare)
    recipe = _train(build_recipe(content), say if world.is_first else lambda text: None)
    if not world.is_first:
        return None
    return _finish(plan, recipe, out, progress, say)


# --- answers ----------------------------------------------------------------------------------------------------------


def _answer(plan: MakePlan, shape: Any, tokenizer: Tokenizer, out: Path, progress: Progress, say: Say) -> None:
    """In rounds, each as large as the time that is left allows by the speed of those before it."""
    total = MAX_PROMPTS if plan.prompts is None else sum(1 for _ in read_prompts(plan.prompts))
    options = [{"enable_thinking": True}, {"enable_thinking": False}] if plan.has_thinking else [{}]
    generator, file = _generator(plan, shape), out / "answers.jsonl"
    done, wanted = _num_lines(file), 64 if plan.device == "cpu" else 2048
    while done < total and progress.answer_seconds < plan.answer_seconds:
        if done:
            left = plan.answer_seconds - progress.answer_seconds
            speed = done / max(progress.answer_seconds, 1.0)
            wanted = min(4 * done, done + max(16, int(speed * left)))
        wanted, began = min(wanted, total), time.monotonic()
        try:
            report = regenerate(
                generator,
                tokenizer,
                plan.prompts,
                file,
                max_tokens=plan.max_answer_tokens,
                model=plan.model,
                template_options=options,
                max_seconds=plan.answer_seconds - progress.answer_seconds,
                self_prompted=wanted if plan.prompts is None else None,
                limit=None if plan.prompts is None else wanted,
            )
            say(f"answers: {report}")
        except PromptsExhausted as error:
            say(f"answers: {error}")
            total = 0
        progress.answer_seconds += time.monotonic() - began
        progress.save()
        before, done = done, _num_lines(file)
        if plan.prompts is not None and wanted == total and done == before:
            break  # the rest was refused, as the reports say
    del generator
    gc.collect()
    if plan.device.startswith("cuda"):
        torch.cuda.empty_cache()
    if done < 8:
        raise UserError(f"{file}: {done} answers are too few to train on; give more time (--hours) or more prompts (--prompts)")
    _split(file, out / "data")
    progress.finish("answers")


def _generator(plan: MakePlan, shape: Any) -> AnswerGenerator:
    if plan.endpoint is not None:
        layers = (*plan.aux_layers, plan.num_layers)
        command = launch_command(plan.model, layers)
        client = StatesClient(plan.endpoint, layers, shape.hidden_size, plan.endpoint_states, command)
        return EndpointAnswers(client, ENDPOINT_REQUESTS)
    from fledge.engine.offline import answer_generator

    return answer_generator(plan.model, device=plan.device)


def _num_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _split(answers: Path, folder: Path) -> None:
    """A tenth of the conversations, 64 at most, are held out: the same ones for the same answers."""
    with answers.open("rb") as file:
        order = sorted((hashlib.sha256(json.loads(line)["id"].encode()).digest(), number) for number, line in enumerate(file))
    chosen = {number for _, number in order[: min(64, max(2, len(order) // 10))]}
    for name, wanted in (("held-out", True), ("train", False)):

        def write(target: Any, wanted: bool = wanted) -> None:
            with answers.open("rb") as file:
                target.writelines(line for number, line in enumerate(file) if (number in chosen) == wanted)

        write_atomically(folder / f"{name}.jsonl", write)


# --- training ---------------------------------------------------------------------------------------------------------


def _recipe(plan: MakePlan, out: Path, progress: Progress, say: Say) -> Recipe:
    """Written once, so that a resumed run has the same steps; the time may be another."""
    path, seconds = out / "recipe.yaml", plan.train_seconds(progress.answer_seconds)
    if path.is_file():
        recipe = load_recipe(path)
        return replace(recipe, run=replace(recipe.run, max_seconds=seconds, device=plan.device))
    train_file = out / "data" / "train.jsonl"
    with train_file.open("rb") as file:
        turns = (turn for line in file for turn in json.loads(line)["turns_ids"][-1:])
        lengths = [len(turn["prompt_ids"]) + len(turn["answer_ids"]) for turn in turns]
    recipe = build_recipe(plan.recipe(out / "run", train_file, out / "data" / "held-out.jsonl", lengths, seconds))
    write_atomically(path, lambda file: file.write(recipe.to_yaml().encode()))
    say(f"training on {sum(lengths):,} tokens, {recipe.data.global_batch_size} rows a step: {path}")
    return recipe


def _train(recipe: Recipe, say: Say) -> Recipe:
    """With smaller micro-batches where memory runs out, which changes nothing but the speed. Returns what fitted."""
    while True:
        try:
            if not train(recipe).finished:
                raise Interrupted("interrupted; the same command continues")
            return recipe
        except TrainingStopped as error:
            size = recipe.data.micro_batch_size // 2
            if not isinstance(error.__cause__, torch.OutOfMemoryError) or (not size and recipe.objective.recompute):
                raise
            say(f"memory ran out; trying again with {max(1, size)} rows at a time, recomputing activations")
            data, objective = replace(recipe.data, micro_batch_size=max(1, size)), replace(recipe.objective, recompute=True)
            recipe = replace(recipe, data=data, objective=objective)
            torch.cuda.empty_cache()


# --- checks and card --------------------------------------------------------------------------------------------------


def _finish(plan: MakePlan, recipe: Recipe, out: Path, progress: Progress, say: Say) -> Made:
    run, folder = Path(recipe.output), out / "drafter"
    fresh = folder.with_name(".drafter")
    shutil.rmtree(fresh, ignore_errors=True)
    copy_folder(run / "best", fresh)
    questions = _questions(out / "data" / "held-out.jsonl")
    resolved = resolve(recipe, DistributedContext())
    kept = robustness(resolved, fresh, questions[:16], texts=plan.augments)
    diagnosis = None
    if plan.endpoint is None:
        with progress_bars.task("doctor", unit="trials") as shown:
            diagnosis = diagnose(fresh, plan.model, prompts=questions[:8], device=plan.device, on_trial=shown.show)
    record = json.loads((fresh / "provenance.json").read_text())
    evaluation = record["evaluation"]
    commands = launch_commands(fresh, folder, plan.model, NUM_DRAFT_TOKENS)
    healthy = None if diagnosis is None else diagnosis.healthy
    made = Made(folder, evaluation["acceptance_length"], healthy, kept, commands)
    card = _card(plan, recipe, made, record, diagnosis, progress.answer_seconds)
    (fresh / "README.md").write_text(card, encoding="utf-8")
    shutil.copy(run / "curves.png", fresh / "curves.png")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    progress.finish("drafter")
    say(card)
    return made


def _questions(held_out: Path) -> list[str]:
    with held_out.open("rb") as file:
        chats = [json.loads(line)["messages"] for line in file]
    return [next(message["content"] for message in chat if message["role"] == "user") for chat in chats]


def _card(
    plan: MakePlan,
    recipe: Recipe,
    made: Made,
    record: dict[str, Any],
    diagnosis: Diagnosis | None,
    answer_seconds: float,
) -> str:
    evaluation = record["evaluation"]
    seen = f"{record['step']:,} steps, {record['tokens']:,} tokens"
    lengths = ", ".join(
        f"{length:.2f} ± {evaluation['standard_error'][depth]:.2f} at depth {depth}"
        for depth, length in evaluation["acceptance_length"].items()
    )
    health = "not asked: the target runs on a server" if diagnosis is None else diagnosis.explanation
    lines = [
        f"# EAGLE 3.1 drafter for {Path(plan.model).name}",
        "",
        f"Made by `fledge make` in {plan.hours:g} hours: {_num_lines(Path(recipe.data.train[0])):,} conversations answered by "
        f"the target itself ({answer_seconds:,.0f} s), then {seen} of training. `provenance.json` has the whole recipe.",
        "",
        f"- acceptance length on held-out prompts, greedy chain: {lengths}",
        *(
            f"- {kept.setting}: {kept.acceptance_length:.2f} ± {kept.standard_error:.2f} at depth 5 ({kept.share:.0%})"
            for kept in made.robustness
        ),
        f"- doctor: {health}",
        "",
        "![loss, accuracy and acceptance over the run](curves.png)",
        "",
        "## Serve",
        "",
        *(f"{name}:\n\n```bash\n{command}\n```\n" for name, command in made.commands.items()),
    ]
    return "\n".join(lines)
