"""Trains word2vec beside gensim, on the same texts with the same settings, and compares speed, quality and memory.

``python bench/word2vec.py --data FOLDER``, where FOLDER has ``corpora/schools_wiki_2007.text8.xz`` (or ``.txt``) and
``wordsim/`` with the sets that word2vec_sets.py names; these data are not part of this repository, and --corpus and --sets
take others. The second corpus, the World Factbook, comes with the package. Some of the sets are those that settings of the
package were chosen on, the others are reserved: they are reported apart. Each run is a process of its own, gensim's and ours
in turn, seed by seed, so that whatever else the machine does hits all alike. The result goes to
``bench/results/<device>/word2vec.json``, with a picture beside it; bench/readme.py puts both into docs/word2vec.md. Needs
gensim and psutil (extra ``dev``).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from needs import DataError, require
from store import FULL, PARTIAL, QUICK, ROOT, WORD2VEC, header, path_of, write
from word2vec_data import MODELS, CorpusSettings, Settings, find_corpora
from word2vec_process import OutOfTimeError, ProcessError
from word2vec_sets import find_sets
from word2vec_statistics import MOST_SEEDS

sys.path.insert(0, str(ROOT))  # also where the package is not installed

from word2vec_bootstrap import with_differences
from word2vec_figure import markdown, save
from word2vec_session import Session

from speedtransfer.errors import SpeedtransferError
from speedtransfer.word2vec.optimizers import find_optimizer


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = _parser().parse_args(arguments)
    settings = _settings(args)
    try:
        require("gensim", "psutil")
        for optimizer in settings.optimizers:
            find_optimizer(optimizer)
        corpora, sets = find_corpora(args.data, args.corpus, args.epochs), find_sets(args.data, args.sets)
        about = header(ROOT, WORD2VEC)  # before: the sources as they are when it starts
        about["environment"]["versions"]["gensim"] = importlib.metadata.version("gensim")
        out = args.out or path_of(ROOT, about["environment"]["device"], WORD2VEC, QUICK if args.words else FULL)
        partial = out.with_name(f"{out.stem}{PARTIAL}.json")
        with tempfile.TemporaryDirectory(prefix="speedtransfer-") as folder:
            session = Session(Path(folder), settings, sets, partial, args.limit)
            session.prepare(corpora, about, args.resume)
            stopped = session.run_all()
    except (DataError, SpeedtransferError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ProcessError, OutOfTimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        return 130
    result = with_differences(session.result, sets)
    print("", markdown(result, ""), sep="\n")
    if stopped or result["failures"]:
        print(
            f"error: {stopped or 'a run failed'}; what was measured is in {partial}: --resume goes on", file=sys.stderr
        )
        return 1
    write(out, {**result, "complete": True})
    partial.unlink()
    print(f"wrote {out}")
    if problem := save(result, out.with_suffix(".png")):
        print(problem, file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/word2vec.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of corpora/ and wordsim/")
    files = {"type": Path, "nargs": "+", "action": "extend", "metavar": "FILE"}
    parser.add_argument("--corpus", help="other texts", **files)
    parser.add_argument("--sets", help="other word pairs with scores, or analogies", **files)
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
    parser.add_argument(
        "--dims", type=_list_of(_count), default=Settings.dims, metavar="N,N", help="by default 100,300"
    )
    parser.add_argument(
        "--models",
        type=_list_of(_model),
        default=MODELS,
        metavar="A,B",
        help=f"by default {','.join(MODELS)}; only the first of them in further dimensions",
    )
    parser.add_argument(
        "--optimizers",
        type=_list_of(str.lower),
        default=Settings.optimizers,
        metavar="A,B",
        help="ours; only the first of them in further dimensions",
    )
    parser.add_argument("--seeds", type=_count, default=Settings.seeds, help=f"by default {Settings.seeds}")
    usual = f"by default {CorpusSettings().epochs}, and more on the corpus of the package"
    parser.add_argument("--epochs", type=_count, metavar="N", help=usual)
    parser.add_argument(
        "--words", type=_count, metavar="N", help="only the first N words of each text, for a quick look"
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop after that; --resume goes on another time")
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier run has left")
    return parser


def _settings(args: argparse.Namespace) -> Settings:
    if args.data is None and (args.corpus is None or args.sets is None):
        _parser().error("the following arguments are required: --data, or --corpus and --sets")
    if args.seeds > MOST_SEEDS:
        _parser().error(f"--seeds is {args.seeds} but may be at most {MOST_SEEDS}")
    return Settings(args.dims, args.optimizers, args.models, args.seeds, words=args.words)


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _model(text: str) -> str:
    if text.lower() not in MODELS:
        raise ValueError
    return text.lower()


def _list_of(kind: Any) -> Any:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    # For argparse, in the line that refuses another.
    parse.__name__ = f"list of {' and '.join(MODELS)}" if kind is _model else "list"
    return parse


_count.__name__ = "positive int"


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # also in the background, where a shell has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
