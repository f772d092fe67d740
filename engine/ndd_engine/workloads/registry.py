"""Calls the factory of the configured workload and reads the parts that it returned, with everything wrong in them."""

from __future__ import annotations

from typing import Any

from torch import nn

from ndd_engine.config.schema import Config

from . import factory_data, own_module
from .base import CheckedWeight, Workload, item_count, seed_all
from .factory_data import Data
from .interface import Settings
from .own_module import calling
from .problems import Problems, Progress
from .result import NAME_LENGTH, Reader, check_conflicts, read_training, wrong_result

RESULT = "an object, dict or SimpleNamespace with model, train_data and loss"
PARTS = (
    "model", "train_data", "loss", "eval_data", "forward", "metric", "weight", "better", "item", "token",
    "tokens_per_item", "collate", "parts", "epochs_differ", "describe_model", "describe_data", "notes", "shuffle",
    "sampler", "batch_sampler", "optimizer", "scheduler", "scheduler_every", "lr", "step", "eval_step", "state",
    "stateful", "on_step", "on_evaluate", "on_checkpoint", "samples",
)  # fmt: skip


def prepare(config: Config, progress: Progress = lambda _: None) -> Workload:
    """The workload that the factory returns, on the CPU.

    Raises ConfigError with everything that is wrong in the settings, the data and the factory's result, or with the
    line at which the user's code failed, caused by its exception. `progress` is called with short texts to show.
    """
    section = config.workload
    settings = Settings.of(config, progress)
    problems = settings.problems
    progress(f"importing {section.name.partition(':')[0]}")
    factory, where = own_module.load(section)
    # Random numbers drawn by the import must not matter: the module is imported once, but prepared several times.
    seed_all(config.run.seed)
    progress(f"calling {section.name}")
    with calling("the factory", where=where):
        value = factory(settings)
    for name, allowed in settings.options.wrong.items():
        problems.add(
            f"workload.options.{name}", "the factory needs another type", settings.options[name], allowed
        )
    problems.check()
    progress(f"checking the data of {section.name}")
    workload = read_result(value, where, config, settings)
    if ":" in section.name:
        workload.remarks.insert(0, f"{section.name} is defined at {where}")
    factory_data.split(workload, config)
    workload.remarks += factory_data.try_items(workload, config)
    if hasattr(section, "options"):
        settings.options.unused(problems)
    if (items := item_count(workload.train_data)) is not None and workload.order is None:
        settings.check_items(items, f"{workload.item}s")
    factory_data.check_workers(workload, config, problems)
    problems.check()
    return workload


def read_result(value: object, where: str, config: Config, settings: Settings) -> Workload:
    """The parts of the value that a factory returned. where: file and line of the factory.

    Raises ConfigError with everything that is missing or wrong.
    """
    problems = Problems(where)
    if (wrong := wrong_result(value)) is not None:
        problems.add("", f"the factory returned {wrong}", allowed=RESULT)
        problems.check()
    reader = Reader(value, problems)
    model = reader.model()
    train, evaluation = (
        Data() if found is None else factory_data.read_data(name, found, config, problems)
        for name, found in (
            ("train_data", reader.get("train_data", needed=True)),
            ("eval_data", reader.get("eval_data")),
        )
    )
    chosen = (
        reader.typed("shuffle", bool, "True or False"),
        reader.get("sampler"),
        reader.get("batch_sampler"),
    )
    if train.data is not None:
        train = factory_data.with_parts(train, *chosen, config, problems)
    factory_data.check_order(train, evaluation.data is not None, config, problems)
    loss = reader.function("loss", ("output", "batch"), needed=not reader.given("step", "eval_step"))
    if isinstance(loss, nn.modules.loss._Loss):
        name = type(loss).__name__
        advice = f"write it as: lambda output, batch: nn.{name}()(output, batch[1])"
        reader.add("loss", f"nn.{name} takes (output, target)", "a function loss(output, batch)", advice)
    better = reader.text("better") or "lower"
    if better not in ("lower", "higher"):
        message = "this is not a direction in which a metric improves"
        problems.add("better", message, better, '"lower" or "higher"')
    training = read_training(reader, model, config, better)
    check_conflicts(reader, training, config, settings)
    reader.check_unknown(PARTS)
    collate = reader.function("collate", ("items",))
    if collate is None:
        collate = train.collate
        if train.data is not None and evaluation.data is not None and collate != evaluation.collate:
            message = "the DataLoaders train_data and eval_data have different collate functions"
            allowed = "one function for both, from a list of items to a batch"
            reader.add("collate", message, allowed=allowed, suggestion="return it as collate")
    carried = ("state",) if training.state is not None else ()
    functions = {
        "loss": loss,
        "forward": reader.function("forward", ("model", "batch", *carried)),
        "metric": reader.function("metric", ()),
    }
    weight = reader.function("weight", ("batch",))
    others: dict[str, Any] = {
        "weight": None if weight is None else CheckedWeight(weight, where),
        "better": better,
        "item": reader.text("item", longest=NAME_LENGTH) or "item",
        "token": reader.text("token", longest=NAME_LENGTH),
        "tokens_per_item": reader.tokens_per_item(),
        "collate": collate,
        "parts": reader.parts(model),
        "epochs_differ": reader.typed("epochs_differ", bool, "True or False") is True,
        "model_text": reader.text("describe_model", called=True),
        "data_text": reader.text("describe_data", called=True),
        "remarks": reader.lines("notes"),
        "order": train.order,
        "eval_order": evaluation.order,
        "training": training,
    }
    problems.check()
    assert model is not None
    return Workload(config.workload.name, where, model, train.data, evaluation.data, functions, **others)
