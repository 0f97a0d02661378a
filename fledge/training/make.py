"""Makes a drafter for a model: answers, training, checks, model card. An interrupted run continues with the unfinished part.

make.json        settings, seconds spent, completed parts
answers*.jsonl   the target's answers, greedy and sampled, appended line by line
data/            the same answers, split into training and held-out conversations
recipe.yaml      recipe of the training, whose output folder is run/
drafter/         the drafter, with a model card
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fledge import progress as progress_bars
from fledge import sources
from fledge.bench.doctor import Diagnosis, diagnose
from fledge.checkpoints.ends import fetch_ends, text_config
from fledge.checkpoints.export import launch_commands
from fledge.checkpoints.provenance import Provenance
from fledge.config import ModelConfig
from fledge.devices import release_memory, resolve_device
from fledge.errors import UserError
from fledge.files import copy_folder, write_atomically
from fledge.tokenizer import Tokenizer
from fledge.training.arm import OutOfMemory
from fledge.training.context import Log, resolve
from fledge.training.data.loading import data_hash
from fledge.training.datagen.answers import Progress, answer, num_lines, sizes
from fledge.training.distributed import DistributedContext
from fledge.training.evaluate import Judged, Retention, describe_lengths, robustness
from fledge.training.make_plan import MakePlan
from fledge.training.recipe import Recipe, build_recipe, load_recipe
from fledge.training.targets import toy
from fledge.training.targets.loading import target_shape
from fledge.training.trainer import train, train_arms

NUM_DRAFT_TOKENS = 3  # in the serving commands of the model card
ARMS = {"eagle3.1": "", "eagle3": "drafter.version=3"}  # when a twin is trained too


class Interrupted(UserError):
    """Interrupted by SIGINT or SIGTERM. The same command continues."""


@dataclass(frozen=True)
class Made:
    folder: Path
    acceptance_length: dict[str, float]  # by depth, on held-out prompts; without answers that loop
    healthy: bool | None  # result of `fledge doctor`; None: not run, because the target is on a server
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
    decontaminate: Sequence[Path] = (),
    twin: bool = False,
    device: str = "auto",
    log: Log = print,
) -> Made | None:
    """Makes a drafter in `out`. Returns None in the processes of torchrun that are not the first.

    `decontaminate`: files of prompts; prompts that share thirteen consecutive words with one are not answered. `twin`: also
    trains an EAGLE 3 drafter on the same batches, for comparison.
    """
    place = resolve_device(device)
    dist = DistributedContext.join(use_cuda=place.type == "cuda")

    def prepare() -> tuple[MakePlan, Any, Path, Progress]:
        settings = {
            "model": model,
            "prompts": None if prompts is None else str(prompts),
            "endpoint": endpoint,
            "twin": twin,
            "decontaminate": data_hash(decontaminate) if decontaminate else None,
        }
        progress = Progress.load(out / "make.json", settings)
        name = str(toy.make(out / "toy", num_answers=1) / "target") if model == "toy" else model
        folder = fetch_ends(name) if endpoint else sources.resolve(name)
        shape, _ = target_shape(folder)
        if endpoint is None and not isinstance(shape, ModelConfig):
            architecture = ", ".join(text_config(folder).get("architectures") or ["?"])
            raise UserError(
                f"{name}: Fledge does not support its architecture ({architecture}), so it cannot generate answers; run it on "
                "a vLLM server and give its URL with --endpoint (docs/scaling.md)"
            )
        plan = MakePlan.of(
            name,
            shape,
            Tokenizer(folder),
            place,
            hours,
            prompts,
            endpoint,
            endpoint_states,
            num_processes=dist.size,
            num_answering=1 if endpoint else dist.local_size,  # other machines may not see the same files
            twin=twin,
        )
        log(f"the plan, for {hours:g} hours:\n{plan.describe()}")
        if "training" not in progress.done:
            progress.hours = hours
        elif hours > progress.hours:
            log(
                f"the training is already complete, with a time limit of {progress.hours:g} hours; to train longer, give "
                f"another output folder (--prompts {out / 'data' / 'train.jsonl'} uses the same prompts)"
            )
        out.mkdir(parents=True, exist_ok=True)
        progress.save()
        return plan, shape, folder, progress

    try:
        log = log if dist.is_first else (lambda text: None)
        plan, shape, folder, progress = dist.on_first(prepare)
        if "answers" not in progress.done:
            tokenizer = Tokenizer(folder) if dist.rank < plan.num_answering else None
            answer(plan, shape, tokenizer, out, progress, decontaminate, log, dist)
        recipe = build_recipe(dist.on_first(lambda: _recipe(plan, out, progress, log).to_dict()))
        if "training" not in progress.done:
            recipe = _train(recipe, twin, log, dist)
    finally:
        dist.leave()
    if not dist.is_first:
        return None
    if "training" not in progress.done:
        progress.finish("training")
    release_memory(place)
    return _finish(plan, recipe, out, progress, twin, log)


# --- training ---------------------------------------------------------------------------------------------------------


def _recipe(plan: MakePlan, out: Path, progress: Progress, log: Log) -> Recipe:
    """Returns the training recipe. It is written only once, so that a resumed run has the same steps; times may change."""
    path, seconds = out / "recipe.yaml", plan.train_seconds(progress.spent)
    if path.is_file():
        recipe = load_recipe(path)
        return replace(recipe, run=replace(recipe.run, **plan.run_times(seconds), device=plan.device))
    train_file = out / "data" / "train.jsonl"
    num_tokens, longest = sizes(train_file)
    held_out = out / "data" / "held-out.jsonl"
    recipe = build_recipe(plan.recipe(out / "run", train_file, held_out, num_tokens, longest, seconds))
    write_atomically(path, lambda file: file.write(recipe.to_yaml().encode()))
    log(f"training on about {num_tokens:,.0f} tokens, {recipe.data.global_batch_size} rows a step: {path}")
    return recipe


def _train(recipe: Recipe, twin: bool, log: Log, dist: DistributedContext) -> Recipe:
    """Trains, and returns the recipe that fitted. If memory runs out, all processes retry with smaller micro-batches, which
    only changes the speed."""
    began = time.perf_counter()
    while True:
        try:
            if twin:
                results = train_arms(recipe, [f"{name}={keys}" for name, keys in ARMS.items()], began=began, dist=dist)
                result = results["eagle3.1"]
            else:
                result = train(recipe, began=began, dist=dist)
            if not result.finished:
                raise Interrupted("interrupted; the same command continues")
            return recipe
        except OutOfMemory as error:
            size = recipe.data.micro_batch_size // 2
            # If not on all, the other processes still wait in a collective: this process exits, and torchrun ends them.
            if not error.on_all or (not size and recipe.objective.recompute):
                raise
            log(f"out of memory; trying again with micro-batches of {max(1, size)} rows and recomputed activations")
            data, objective = replace(recipe.data, micro_batch_size=max(1, size)), replace(recipe.objective, recompute=True)
            recipe = replace(recipe, data=data, objective=objective)
        # After the except block, because the error references all the memory that did not fit.
        release_memory(resolve_device(recipe.run.device))


# --- checks and card --------------------------------------------------------------------------------------------------


def _finish(plan: MakePlan, recipe: Recipe, out: Path, progress: Progress, twin: bool, log: Log) -> Made:
    run, folder = Path(recipe.output), out / "drafter"
    if twin:
        shutil.rmtree(out / "twin", ignore_errors=True)
        copy_folder(run / "eagle3" / "best", out / "twin")
        run = run / "eagle3.1"
    fresh = folder.with_name(".drafter")
    shutil.rmtree(fresh, ignore_errors=True)
    copy_folder(run / "best", fresh)
    questions = _questions(out / "data" / "held-out.jsonl")
    resolved = resolve(recipe, DistributedContext())
    retained = robustness(resolved, fresh, questions[:16], texts=plan.augments)
    diagnosis = None
    if plan.endpoint is None:
        with progress_bars.task("doctor", unit="trials") as shown:
            diagnosis = diagnose(
                fresh, plan.model, prompts=questions[:8], device=plan.device, search_layers=False, on_trial=shown.show
            )
    record = Provenance.read(fresh).record
    # For a built-in name or a GGUF file, the commands of other servers name the converted folder.
    converted = plan.model in sources.BUILT_INS or Path(plan.model).is_file()
    elsewhere = sources.resolve(plan.model) if converted else None
    commands = launch_commands(fresh, folder, plan.model, NUM_DRAFT_TOKENS, elsewhere)
    healthy = None if diagnosis is None else diagnosis.healthy
    made = Made(folder, Judged.of(record["evaluation"]).length, healthy, retained, commands)
    if (run / "curves.png").is_file():  # missing if matplotlib is not installed
        shutil.copy(run / "curves.png", fresh / "curves.png")
    card = _card(plan, recipe, made, record, diagnosis, curves=(fresh / "curves.png").is_file())
    (fresh / "README.md").write_text(card, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    if "drafter" not in progress.done:
        progress.finish("drafter")
    log(card)
    return made


def _questions(held_out: Path) -> list[str]:
    with held_out.open("rb") as file:
        chats = [json.loads(line)["messages"] for line in file]
    return [next(message["content"] for message in chat if message["role"] == "user") for chat in chats]


def _card(
    plan: MakePlan,
    recipe: Recipe,
    made: Made,
    record: Mapping[str, Any],
    diagnosis: Diagnosis | None,
    *,
    curves: bool,
) -> str:
    seen = f"{record['step']:,} steps, {record['tokens']:,} tokens"
    health = "not run, because the target is on a server" if diagnosis is None else diagnosis.explanation
    lines = [
        f"# EAGLE 3.1 drafter for {Path(plan.model).name}",
        "",
        f"Made by `fledge make` in {plan.hours:g} hours: {num_lines(Path(recipe.data.train[0])):,} conversations answered by "
        f"the target itself, then {seen} of training. `provenance.json` has the whole recipe.",
        "",
        f"- acceptance length on held-out prompts, greedy chain: {describe_lengths(record['evaluation'])}",
        *(f"- {retention}" for retention in made.robustness),
        f"- doctor: {health}",
        "",
        *(("![loss, accuracy and acceptance over the run](curves.png)", "") if curves else ()),
        "## Serve",
        "",
        *(f"{name}:\n\n```bash\n{command}\n```\n" for name, command in made.commands.items()),
    ]
    return "\n".join(lines)
