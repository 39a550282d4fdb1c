"""A taskset of verifiers, for tests: which number comes after another, asked twice.

It is right to answer n + 1 and then n + 2. `fault` is what goes wrong while it is rewarded, or, for
"hang", before anything is asked. With `task.tools` a tool tells the successor.
"""

import sys

import verifiers.v1 as vf


class NumberTaskConfig(vf.TaskConfig):
    tools: bool = False


class NumberConfig(vf.TasksetConfig):
    task: NumberTaskConfig = NumberTaskConfig()
    numbers: tuple[int, ...] = (4, 7)
    fault: str = ""


class NumberData(vf.TaskData):
    number: int
    fault: str


class SuccessorConfig(vf.ToolsetConfig):
    pass


class Successor(vf.Toolset[SuccessorConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def successor(self, number: int) -> str:
        """Tell which number comes after another."""
        return str(number + 1)


class NumberTask(vf.Task[NumberData, vf.State, NumberTaskConfig]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        sys.stdout.write("a taskset may print\n")
        if self.data.fault == "hang":
            await runtime.run(["sleep", "8639.25"], {})

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.fault == "raise":
            raise ValueError("no rule for this")
        if self.data.fault == "exit":
            sys.exit("no runtime here")
        said = [m.content.strip() for m in trace.assistant_messages if m.content]
        return float(said == [str(self.data.number + 1), str(self.data.number + 2)])

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @classmethod
    def toolsets(cls, config: NumberTaskConfig) -> list[vf.Toolset]:
        return [Successor(SuccessorConfig())] if config.tools else []


class Numbers(vf.Taskset[NumberTask, NumberConfig]):
    def load(self) -> list[NumberTask]:
        return [
            NumberTask(
                NumberData(prompt=f"after {n}?", number=n, fault=self.config.fault),
                self.config.task,
            )
            for n in self.config.numbers
        ]


class TwiceConfig(vf.EnvConfig):
    pupil: vf.AgentConfig = vf.AgentConfig()


class Twice(vf.Env[TwiceConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.pupil.interaction(task) as talk:
            await talk.turn()
            await talk.turn("and after that?")


__all__ = ["Numbers", "Twice"]

if __name__ == "__main__":
    Successor.run()
