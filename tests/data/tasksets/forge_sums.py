"""A taskset of verifiers, for tests: which number comes after another, asked once."""

import verifiers.v1 as vf


class SumConfig(vf.TasksetConfig):
    numbers: tuple[int, ...] = (4, 7)


class SumData(vf.TaskData):
    number: int


class SumTask(vf.Task[SumData, vf.State]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        said = [m.content.strip() for m in trace.assistant_messages if m.content]
        return float(said == [f"answer {self.data.number + 1}"])


class Sums(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        return [SumTask(SumData(prompt=f"after {n}?", number=n)) for n in self.config.numbers]


__all__ = ["Sums"]
