"""Answers word by word, with transformers' own streamer: one after the other, to be stopped at any token, the same for
the same seed."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, StoppingCriteria, TextIteratorStreamer

from cpt.data.store.tokenization import adds_bos
from cpt.errors import CheckpointError, DataError, LaunchError
from cpt.serving.sides import Side

Turn = dict[str, str]
"""`role` and `content`, as chat templates take them."""
SWITCHES = {"true": True, "false": False}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.7
    """0: always the most likely one."""
    top_p: float = 0.95
    max_new_tokens: int = 128
    seed: int = 0

    def generation_config(self, room: int) -> GenerationConfig:
        """As transformers takes it, with no more tokens than there is room for."""
        length = {"max_new_tokens": min(self.max_new_tokens, room), "use_cache": True}
        if self.temperature == 0:
            return GenerationConfig(do_sample=False, **length)
        return GenerationConfig(do_sample=True, temperature=self.temperature, top_p=self.top_p, top_k=0, **length)


def sampling_of(words: Sequence[str]) -> Sampling:
    """The words of the command line (`max_new_tokens=200 do_sample=False`), where the page begins.

    Raises:
        LaunchError: a word is none that the page has a control for.
    """
    sampling = Sampling()
    kinds = {name: type(value) for name, value in vars(sampling).items()}
    for word in words:
        name, _, text = word.partition("=")
        try:
            if name == "do_sample":
                sampling = sampling if SWITCHES[text.lower()] else replace(sampling, temperature=0.0)
            else:
                sampling = replace(sampling, **{name: kinds[name](text)})
        except (KeyError, ValueError) as problem:
            known = " ".join(f"{key}={value}" for key, value in vars(Sampling()).items())
            raise LaunchError(
                f"`{word}` is nothing that the page can begin with. It takes: {known} do_sample=False"
            ) from problem
    return sampling


class Answers:
    """All answers of this process, made by one thread: seeds are torch's global ones, and an adapter is switched off
    for everybody."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")

    def stream(
        self,
        side: Side,
        turns: Sequence[Turn],
        sampling: Sampling,
        stopped: threading.Event,
        *,
        as_chat: bool = False,
        system_prompt: str | None = None,
    ) -> Iterator[str]:
        """The text so far, longer each time; it ends early where `stopped` is set, or nobody asks for more.

        Args:
            turns: of the conversation; the last one is the user's.
            as_chat: in the model's template, where it has one; otherwise the last turn is a text to go on from, and
                all that it gets.

        Raises:
            DataError: there is no room for an answer, or the model's template does not take these turns.
            CheckpointError: the model fails.
        """
        ids = prompt_ids(side, turns, as_chat=as_chat, system_prompt=system_prompt)
        room = side.positions - ids.shape[1]
        if ids.shape[1] == 0:
            raise DataError("the prompt is empty, and this model has no token to begin a text with. Write something.")
        if room < 1:
            raise DataError(
                f"the text has {ids.shape[1]:,} tokens, and the model knows {side.positions:,} positions. Shorten it,"
                " or clear."
            )
        streamer = TextIteratorStreamer(side.tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
        unheard = threading.Event()
        job = Job(ids, sampling.generation_config(room), sampling.seed, streamer, (stopped, unheard))
        done = self._thread.submit(generate, side, job)
        done.add_done_callback(lambda _: streamer.end())
        text = ""
        try:
            for piece in streamer:
                text += piece
                yield text
            done.result()
        except (RuntimeError, ValueError, IndexError) as problem:
            reason = " ".join(str(problem).split())[:300]
            raise CheckpointError(
                f"{side.name} could not answer: {reason}. Ask for fewer tokens, or clear."
            ) from problem
        finally:
            unheard.set()

    def close(self) -> None:
        """Wait for the thread; what it makes must have been stopped."""
        self._thread.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class Job:
    """One answer that is asked for."""

    ids: torch.Tensor
    config: GenerationConfig
    seed: int
    streamer: TextIteratorStreamer
    ends: tuple[threading.Event, ...]
    """Each of them ends it."""

    @property
    def is_over(self) -> bool:
        """Whether one of them is set."""
        return any(event.is_set() for event in self.ends)


class WhenOver(StoppingCriteria):
    """Ends an answer after the token at which nobody wants more of it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """As transformers asks: one truth for each row."""
        return torch.full((input_ids.shape[0],), self.job.is_over, device=input_ids.device, dtype=torch.bool)


def generate(side: Side, job: Job) -> None:
    """In the thread of all answers."""
    if job.is_over:
        return
    torch.manual_seed(job.seed)
    model: Any = side.model  # peft's wrapper and transformers' model declare `generate` in two ways
    with torch.inference_mode(), side.speaking():
        ids = job.ids.to(model.device)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=job.config,
            streamer=job.streamer,
            stopping_criteria=[WhenOver(job)],
        )


def prompt_ids(side: Side, turns: Sequence[Turn], *, as_chat: bool, system_prompt: str | None = None) -> torch.Tensor:
    """[1, T]: the conversation in the model's template, or the last text as training would begin a document with it.

    Raises:
        DataError: the template refuses the turns.
    """
    if not (as_chat and side.has_template):
        begin = [side.tokenizer.bos_token_id] if adds_bos(side.tokenizer) else []
        return torch.tensor(
            [begin + side.tokenizer(turns[-1]["content"], add_special_tokens=False)["input_ids"]], dtype=torch.long
        )
    first = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    try:
        encoded: Any = side.tokenizer.apply_chat_template(
            [*first, *turns], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as problem:
        raise DataError(
            f"the chat template of {side.name} does not take this conversation: {problem}. Clear it."
        ) from problem
    ids: torch.Tensor = encoded["input_ids"]
    return ids
