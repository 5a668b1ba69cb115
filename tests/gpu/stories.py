"""Owns what is played for the recorded runs: takes, each a recording; stories, each one GPU's; tenants and their habits.

Refuses chance: every tenant draws from a seed of its own name. Sizes are parts of the card, times seconds of the take.
"""

from dataclasses import dataclass, field


@dataclass
class Cast:
    """One tenant: its unit, its habit with what it is given. `drives`: it is what fills the card. `again`: it is started again after a
    failure, with so much given otherwise."""

    unit: str
    habit: str
    given: dict = field(default_factory=dict)
    drives: bool = False
    again: dict | None = None


@dataclass
class Story:
    """One GPU's part of a take. `ends` says what is meant to come: built up, no notice, or nothing."""

    name: str
    ends: str
    cast: list


@dataclass
class Take:
    name: str
    seconds: float
    stories: list


def cast(unit, habit, drives=False, again=None, **given):
    return Cast(unit, habit, given, drives, again)


BUILT_UP, NO_NOTICE, NOTHING = "built up", "no notice", "nothing"

LENGTHENING = Story("lengthening-sequences", BUILT_UP, [
    cast("trainer.service", "lengthen", drives=True, base=0.2, since=32, wall=116),
    cast("embedder.service", "steady", base=0.22),
    cast("thumbnails.service", "service", base=0.02, ask=0.02),
])
ACCUMULATION = Story("accumulation-and-checkpoints", NOTHING, [
    cast("pretrain.service", "accumulate", base=0.45, micro=0.14, checkpoint=0.18, period=24),
    cast("reranker.service", "steady", base=0.1),
])
LEAK = Story("leak-beside-a-trainer", BUILT_UP, [
    cast("ingest.service", "leak", drives=True, base=0.05, since=30, wall=102),
    cast("finetune.service", "accumulate", base=0.2, micro=0.1, checkpoint=0.0, period=1000),
    cast("ranker.service", "service", base=0.03, ask=0.015),
])
EVALUATION = Story("evaluation-phases", NOTHING, [
    cast("classifier.service", "evaluate", base=0.55, micro=0.12, evaluation=0.14, period=24, lasts=8),
    cast("tagger.service", "steady", base=0.08),
])
OVERLOAD = Story("kv-cache-overload", BUILT_UP, [
    cast("llm.service", "serve", drives=True, base=0.25, low=0.04, swing=0.06, period=22, since=32, wall=106, tidies=False),
    cast("whisper.service", "steady", base=0.3),
    cast("gateway.service", "service", base=0.01, ask=0.02, every=0.8),
])
FULL = Story("quiet-at-95-percent", NOTHING, [
    cast("batch.service", "steady", base=0.6),
    cast("search.service", "steady", base=0.335),
])
NOTEBOOK = Story("notebook-to-the-wall", BUILT_UP, [
    cast("jupyter.service", "notebook", drives=True, base=0.03, smallest=0.008, largest=0.035, pause=(1.0, 2.8), since=26),
    cast("speech.service", "steady", base=0.3),
    cast("vision.service", "service", base=0.02, ask=0.025),
])
LEVELLING = Story("ramp-that-levels-off", NOTHING, [
    cast("warehouse.service", "levels", base=0.1, since=32, wall=95, share=0.8),
    cast("recommender.service", "steady", base=0.35),
])
STAIRCASE = Story("staircase-leak", BUILT_UP, [
    cast("scraper.service", "leak", drives=True, base=0.05, since=28, wall=96, step=0.028, every=3.6),
    cast("trainer.service", "accumulate", base=0.25, micro=0.12, checkpoint=0.0, period=1000),
])
SWINGS = Story("kv-cache-that-fits", NOTHING, [
    cast("chat.service", "serve", base=0.3, low=0.05, swing=0.26, period=26),
    cast("moderation.service", "steady", base=0.28),
])
SEVERAL = Story("several-at-once", BUILT_UP, [
    cast("trainer.service", "lengthen", drives=True, base=0.08, since=32, wall=108, share=0.45),
    cast("indexer.service", "leak", drives=True, base=0.05, since=36, wall=108, share=0.35),
    cast("llm.service", "serve", drives=True, base=0.15, low=0.03, swing=0.03, period=17, since=40, wall=108, share=0.4),
    cast("gateway.service", "service", base=0.01, ask=0.015, every=0.7),
])
BURST = Story("burst-without-notice", NO_NOTICE, [
    cast("report.service", "steady", base=0.2, burst=(80, 0.215)),
    cast("search.service", "steady", base=0.42),
    cast("chat.service", "steady", base=0.2),
])
LEAKERS = Story("two-leakers", BUILT_UP, [
    cast("ingest.service", "leak", drives=True, base=0.08, since=30, wall=100, share=0.6),
    cast("scraper.service", "leak", drives=True, base=0.04, since=38, wall=108, share=0.75, step=0.006),
    cast("ranker.service", "service", base=0.03, ask=0.01),
    cast("finetune.service", "steady", base=0.35),
])
RESTART = Story("trainer-restarted-after-the-failure", BUILT_UP, [
    cast("trainer.service", "lengthen", drives=True, base=0.25, since=30, wall=98,
         again={"since": 105, "wall": 160, "share": 0.4}),
    cast("embedder.service", "steady", base=0.3),
])
SLOW = Story("slow-leak", BUILT_UP, [
    cast("cachewarmer.service", "leak", drives=True, base=0.1, since=30, wall=118, step=0.001),
    cast("batch.service", "steady", base=0.55),
    cast("vision.service", "service", base=0.02, ask=0.012),
])
TIDY = Story("notebook-that-clears", NOTHING, [
    cast("jupyter.service", "notebook", base=0.05, smallest=0.01, largest=0.05, pause=(1.5, 4.0), most=0.4, clears=0.15),
    cast("speech.service", "steady", base=0.3),
    cast("tagger.service", "service", base=0.02, ask=0.02),
])

# Longer ones, later: growth of one and a half minutes and more, so that half a minute ahead there is something to see.
LONG_SEQUENCES = Story("longer-sequences", BUILT_UP, [
    cast("trainer.service", "lengthen", drives=True, base=0.15, since=34, wall=140, stage=5.0),
    cast("embedder.service", "steady", base=0.25),
    cast("thumbnails.service", "service", base=0.02, ask=0.01),
])
LONG_STAIRCASE = Story("staircase-of-small-steps", BUILT_UP, [
    cast("scraper.service", "leak", drives=True, base=0.08, since=34, wall=136, step=0.018, every=4.2),
    cast("pretrain.service", "accumulate", base=0.2, micro=0.08, checkpoint=0.04, period=31),
])
LONG_OVERLOAD = Story("kv-cache-overload-slowly", BUILT_UP, [
    cast("llm.service", "serve", drives=True, base=0.2, low=0.03, swing=0.07, period=19, since=34, wall=138, tidies=False),
    cast("whisper.service", "steady", base=0.28),
    cast("gateway.service", "service", base=0.01, ask=0.01, every=1.3),
])
LONG_SEVERAL = Story("several-at-once-slowly", BUILT_UP, [
    cast("indexer.service", "leak", drives=True, base=0.06, since=34, wall=140, share=0.5, step=0.004),
    cast("vllm.service", "serve", drives=True, base=0.12, low=0.02, swing=0.04, period=15, since=38, wall=140, share=0.4),
    cast("trainer.service", "lengthen", drives=True, base=0.08, since=36, wall=140, share=0.3),
    cast("ranker.service", "service", base=0.02, ask=0.012, every=0.9),
])
LONG_NOTEBOOK = Story("notebook-in-small-cells", BUILT_UP, [
    cast("jupyter.service", "notebook", drives=True, base=0.04, smallest=0.006, largest=0.025, pause=(1.2, 3.0), since=30),
    cast("speech.service", "steady", base=0.32),
    cast("vision.service", "service", base=0.02, ask=0.015),
])
LONG_LEAKERS = Story("leakers-beside-evaluations", BUILT_UP, [
    cast("ingest.service", "leak", drives=True, base=0.05, since=34, wall=140, share=0.65),
    cast("scraper.service", "leak", drives=True, base=0.03, since=44, wall=144, share=0.6, step=0.007),
    cast("classifier.service", "evaluate", base=0.25, micro=0.06, evaluation=0.08, period=27, lasts=7),
])
LONG_LEAK = Story("leak-of-three-minutes", BUILT_UP, [
    cast("cachewarmer.service", "leak", drives=True, base=0.06, since=36, wall=220, step=0.0015),
    cast("finetune.service", "accumulate", base=0.22, micro=0.08, checkpoint=0.03, period=40),
    cast("tagger.service", "service", base=0.02, ask=0.01),
])
LONG_SWINGS = Story("two-caches-that-fit", NOTHING, [
    cast("chat.service", "serve", base=0.25, low=0.04, swing=0.22, period=34),
    cast("llm.service", "serve", base=0.15, low=0.03, swing=0.1, period=21, tidies=False),
    cast("search.service", "steady", base=0.12),
])
TWICE = Story("trainer-that-fails-twice", BUILT_UP, [
    cast("trainer.service", "lengthen", drives=True, base=0.2, since=32, wall=122,
         again={"since": 140, "wall": 232}),
    cast("embedder.service", "steady", base=0.3),
    cast("gateway.service", "service", base=0.01, ask=0.01, every=1.1),
])
LONG_LEVELLING = Story("ramp-and-notebook-that-fit", NOTHING, [
    cast("warehouse.service", "levels", base=0.08, since=36, wall=190, share=0.6),
    cast("jupyter.service", "notebook", base=0.03, smallest=0.006, largest=0.03, pause=(1.5, 4.0), most=0.16, clears=0.12),
    cast("recommender.service", "steady", base=0.3),
])

# Later still, one GPU at a time: more tenants a card, and growth of 80 s and more.
ADAPTERS = Story("adapters-loaded-on-demand", BUILT_UP, [
    cast("lora.service", "notebook", drives=True, base=0.1, smallest=0.004, largest=0.02, pause=(0.7, 1.9), since=32),
    cast("speech.service", "steady", base=0.36),
    cast("gateway.service", "service", base=0.01, ask=0.008),
])
CRAWL = Story("leak-beside-evaluations", BUILT_UP, [
    cast("crawler.service", "leak", drives=True, base=0.06, since=34, wall=116, step=0.003),
    cast("classifier.service", "evaluate", base=0.3, micro=0.08, evaluation=0.11, period=23, lasts=7),
    cast("tagger.service", "service", base=0.02, ask=0.012),
])
EVALUATED = Story("sequences-beside-evaluations", BUILT_UP, [
    cast("trainer.service", "lengthen", drives=True, base=0.14, since=34, wall=120),
    cast("classifier.service", "evaluate", base=0.24, micro=0.05, evaluation=0.07, period=21, lasts=6),
    cast("thumbnails.service", "service", base=0.02, ask=0.01, every=1.2),
])
CHECKPOINTED = Story("kv-cache-overload-beside-checkpoints", BUILT_UP, [
    cast("llm.service", "serve", drives=True, base=0.18, low=0.03, swing=0.05, period=18, since=36, wall=134),
    cast("pretrain.service", "accumulate", base=0.22, micro=0.07, checkpoint=0.05, period=29),
    cast("whisper.service", "steady", base=0.1),
])
TRAINERS = Story("two-trainers-that-lengthen", BUILT_UP, [
    cast("trainer.service", "lengthen", drives=True, base=0.12, since=34, wall=122, share=0.6),
    cast("finetune.service", "lengthen", drives=True, base=0.1, since=40, wall=124, share=0.55, stage=6.0),
    cast("embedder.service", "steady", base=0.3),
])
STAIRS = Story("staircase-beside-a-notebook", BUILT_UP, [
    cast("scraper.service", "leak", drives=True, base=0.06, since=34, wall=122, step=0.015, every=3.1),
    cast("jupyter.service", "notebook", base=0.03, smallest=0.006, largest=0.03, pause=(1.5, 4.0), most=0.12, clears=0.15),
    cast("search.service", "steady", base=0.33),
])
FULL_AT_WORK = Story("trainer-and-service-at-95-percent", NOTHING, [
    cast("pretrain.service", "accumulate", base=0.5, micro=0.1, checkpoint=0.0, period=1000),
    cast("search.service", "steady", base=0.26),
    cast("gateway.service", "service", base=0.02, ask=0.015),
])
LATE = Story("leak-after-a-quiet-minute", BUILT_UP, [
    cast("ingest.service", "leak", drives=True, base=0.1, since=62, wall=148, step=0.002),
    cast("reranker.service", "steady", base=0.5),
    cast("ranker.service", "service", base=0.02, ask=0.01, every=0.8),
])
CACHE_AND_LEAK = Story("kv-cache-overload-and-a-leak", BUILT_UP, [
    cast("llm.service", "serve", drives=True, base=0.16, low=0.03, swing=0.04, period=16, since=34, wall=126, share=0.55, tidies=False),
    cast("indexer.service", "leak", drives=True, base=0.05, since=40, wall=124, share=0.6, step=0.004),
    cast("vision.service", "service", base=0.02, ask=0.012),
])
LOADED = Story("leak-after-another-has-loaded", BUILT_UP, [
    cast("warehouse.service", "levels", base=0.1, since=30, wall=60, share=0.35),
    cast("cachewarmer.service", "leak", drives=True, base=0.08, since=70, wall=160, step=0.0025),
    cast("recommender.service", "steady", base=0.3),
])
CROWD = Story("leak-and-sequences-among-services", BUILT_UP, [
    cast("indexer.service", "leak", drives=True, base=0.06, since=34, wall=126, share=0.55, step=0.003),
    cast("trainer.service", "lengthen", drives=True, base=0.1, since=36, wall=126, share=0.6),
    cast("gateway.service", "service", base=0.01, ask=0.01, every=0.7),
    cast("ranker.service", "service", base=0.02, ask=0.02, every=1.6),
])
NOTEBOOKS = Story("two-notebooks", BUILT_UP, [
    cast("jupyter.service", "notebook", drives=True, base=0.04, smallest=0.005, largest=0.02, pause=(1.2, 3.0), since=32),
    cast("lab.service", "notebook", drives=True, base=0.03, smallest=0.004, largest=0.018, pause=(1.5, 3.5), since=38),
    cast("speech.service", "steady", base=0.3),
    cast("tagger.service", "service", base=0.02, ask=0.01),
])
STAGES = Story("sequences-in-long-stages", BUILT_UP, [
    cast("trainer.service", "lengthen", drives=True, base=0.16, since=34, wall=140, stage=8.0),
    cast("finetune.service", "accumulate", base=0.22, micro=0.07, checkpoint=0.0, period=1000),
    cast("whisper.service", "steady", base=0.08),
])
BATCHES = Story("kv-cache-overload-in-batches", BUILT_UP, [
    cast("chat.service", "serve", drives=True, base=0.2, low=0.03, swing=0.09, period=13, since=34, wall=130),
    cast("moderation.service", "steady", base=0.3),
    cast("gateway.service", "service", base=0.01, ask=0.008, every=0.6),
])
TRICKLE = Story("leak-in-small-blocks", BUILT_UP, [
    cast("cachewarmer.service", "leak", drives=True, base=0.08, since=32, wall=114, step=0.0006),
    cast("finetune.service", "accumulate", base=0.25, micro=0.08, checkpoint=0.03, period=26),
    cast("tagger.service", "steady", base=0.1),
])
FINETUNES = Story("sequences-up-to-the-wall-twice", BUILT_UP, [
    cast("finetune.service", "lengthen", drives=True, base=0.18, since=32, wall=114,
         again={"since": 132, "wall": 228}),
    cast("search.service", "steady", base=0.34),
    cast("vision.service", "service", base=0.02, ask=0.01),
])
FITTING = Story("evaluations-and-a-cache-that-fit", NOTHING, [
    cast("classifier.service", "evaluate", base=0.3, micro=0.07, evaluation=0.1, period=24, lasts=7),
    cast("chat.service", "serve", base=0.2, low=0.03, swing=0.12, period=27),
    cast("tagger.service", "service", base=0.02, ask=0.01),
])

# Two GPUs play side by side: one that fills up beside one that, mostly, does not. From 14 on a take is of one GPU.
TAKES = [
    Take("1-sequences", 124, [LENGTHENING, ACCUMULATION]),
    Take("2-leak", 114, [LEAK, EVALUATION]),
    Take("3-cache", 118, [OVERLOAD, FULL]),
    Take("4-notebook", 118, [NOTEBOOK, LEVELLING]),
    Take("5-staircase", 110, [STAIRCASE, SWINGS]),
    Take("6-several", 116, [SEVERAL, BURST]),
    Take("7-leakers", 126, [LEAKERS, RESTART]),
    Take("8-slow", 130, [SLOW, TIDY]),
    Take("9-steps", 160, [LONG_SEQUENCES, LONG_STAIRCASE]),
    Take("10-crowd", 160, [LONG_OVERLOAD, LONG_SEVERAL]),
    Take("11-cells", 160, [LONG_NOTEBOOK, LONG_LEAKERS]),
    Take("12-creep", 250, [LONG_LEAK, LONG_SWINGS]),
    Take("13-twice", 250, [TWICE, LONG_LEVELLING]),
    Take("14-adapters", 124, [ADAPTERS]),
    Take("15-crawl", 120, [CRAWL]),
    Take("16-evaluated", 124, [EVALUATED]),
    Take("17-checkpointed", 138, [CHECKPOINTED]),
    Take("18-trainers", 126, [TRAINERS]),
    Take("19-stairs", 126, [STAIRS]),
    Take("20-full", 100, [FULL_AT_WORK]),
    Take("21-late", 152, [LATE]),
    Take("22-cache-and-leak", 128, [CACHE_AND_LEAK]),
    Take("23-loaded", 164, [LOADED]),
    Take("24-crowd", 128, [CROWD]),
    Take("25-notebooks", 126, [NOTEBOOKS]),
    Take("26-stages", 146, [STAGES]),
    Take("27-batches", 134, [BATCHES]),
    Take("28-trickle", 118, [TRICKLE]),
    Take("29-finetunes", 236, [FINETUNES]),
    Take("30-fitting", 110, [FITTING]),
]


def takes(gpus):
    """As many stories at a time as there are GPUs: with one, each take of two becomes two."""
    if gpus > 1:
        return TAKES
    apart = [[take] if len(take.stories) == 1 else [Take(f"{take.name}-{story.name}", take.seconds, [story]) for story in take.stories] for take in TAKES]
    return [take for takes in apart for take in takes]


def parts(gpus, budget, between):
    """Takes in their order, packed into commands of `budget` seconds; `between` is what starting and ending one costs."""
    parts, left = [], 0.0
    for take in takes(gpus):
        cost = take.seconds + between
        if cost > left:
            parts.append([])
            left = budget
        parts[-1].append(take)
        left -= cost
    return parts
