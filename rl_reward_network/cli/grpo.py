"""Fine-tune Sa2VA's LoRA weights by GRPO: mask -> caption -> mask', and caption -> mask -> caption'.

    sa2va-rl grpo quick --model_path MODEL --data_root DATA
    torchrun --nproc_per_node 8 scripts/train_sa2va_rl.py --model_path MODEL --dataset_name DATA --output_dir OUT

The EMA teacher is a moving average of the model. In loop 1 the reward of a caption is that of the mask which the
teacher gives for it; in loop 2 the reward of a mask is that of the teacher's caption. Data are captioned
regions (Grasp-Any-Region or describe-anything), or annotated images with a reward network (--reward_net), which needs
no labels. With --resume the newest run of these settings is resumed.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rl_reward_network.atomic_io import read_json
from rl_reward_network.cli.app import open_run, show_ending
from rl_reward_network.flags import Rare
from rl_reward_network.grpo.plan import PlanArgs, check_together, make_plan
from rl_reward_network.run import FINAL, GRPO_RUN, check_folder

if TYPE_CHECKING:
    from rl_reward_network.grpo.inputs import GRPOInputs
    from rl_reward_network.models.reward_network import RewardNetwork
    from rl_reward_network.rewards.judge import Judge


@dataclass(frozen=True)
class Args(PlanArgs):
    """Fine-tune Sa2VA's LoRA weights by GRPO in two loops."""

    log_completions: Rare[bool] = False
    """At each line of metrics.jsonl write the sampled captions and masks with their rewards and advantages to
    completions/ in the run's folder, as parquet."""
    run_folder: Rare[Path | None] = None
    """Folder of this run; by default <output_dir>/sa2va_grpo_<time>."""
    resume: bool = False
    """Resume the newest run of these settings, or that in the named folder."""


def check(args: Args) -> None:
    """Raise a ValueError for what can be refused before anything is read."""
    check_together(args, args.rewards.reward_net is not None)
    from rl_reward_network.grpo.inputs import check_config
    from rl_reward_network.models.sa2va.arguments_sa2va import check_bits

    if args.grpo.optim in ("adamw_8bit", "paged_adamw_8bit"):
        check_bits()
    check_config(args.inputs, args.regions)
    check_folder(args.run_folder, GRPO_RUN, args.resume)
    if config := args.rewards.judge_config(args.inputs.output_dir):
        from rl_reward_network.rewards.judge import Judge

        Judge(replace(config, cache_path=None)).check()


def main(args: Args) -> None:
    """Open the data, train, print where the model is."""
    check(args)
    from rl_reward_network.grpo.checkpoint import first_process, run_of_all
    from rl_reward_network.grpo.evaluate import why_not_judged
    from rl_reward_network.grpo.inputs import open_grpo_inputs
    from rl_reward_network.grpo.settings import meanings
    from rl_reward_network.grpo.stage import run_grpo_stage, wanted_settings
    from rl_reward_network.grpo.validation import notice

    inputs = open_grpo_inputs(args.inputs, args.regions)
    network = _reward_network(args.rewards.reward_net, inputs)
    plan = make_plan(args, inputs, network)
    judge = _judge(args)
    if judge is not None:
        plan = replace(plan, judge=args.rewards.judge_facts(judge.config.model))
    run = run_of_all(open_run(GRPO_RUN, args, wanted_settings(inputs, plan)), inputs.device == "cpu")
    why = why_not_judged(inputs.pick("test"), network is not None)
    if first_process():
        run.announce(evaluate=not why)
        print("\n".join([f"data: {inputs.summary}", *meanings(args.grpo, plan.settings)]))
        if run.finished:
            print("nothing to resume: this run is finished")
    if not run.finished:
        run_grpo_stage(inputs, plan, run, judge, network, args.log_completions)
    if first_process():
        lines = [notice(read_json(run / FINAL / "config.json")), f"no evaluation: {why}" if why else ""]
        note = "\n".join(filter(None, lines))
        show_ending({"fine-tuned model": run / FINAL}, args.inputs.output_dir, run.path, note=note)


def _reward_network(folder: Path | None, inputs: "GRPOInputs") -> "RewardNetwork | None":
    """The named reward network, unless it was trained on patients of this run."""
    if folder is None:
        return None
    from rl_reward_network.models.reward_network import RewardNetwork
    from rl_reward_network.reward_training.stage import check_no_leak

    network = RewardNetwork.from_pretrained(folder)
    check_no_leak(inputs.split, network, folder, inputs.samples)
    return network


def _judge(args: Args) -> "Judge | None":
    """The LLM judge, which `check` has asked a first question."""
    if (config := args.rewards.judge_config(args.inputs.output_dir)) is None:
        return None
    from rl_reward_network.grpo.checkpoint import first_process
    from rl_reward_network.rewards.judge import Judge

    judge = Judge(config)
    if first_process():
        where = f"at {config.base_url}, in {' and '.join(args.rewards.judged_loops)}"
        print(f"LLM judge: {judge.config.model} {where}; replies: {config.cache_path or 'off'}")
    return judge
