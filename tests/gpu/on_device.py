"""What every engine must do on a CUDA device, beside tests/engine_cases.py: races that are provoked."""

from __future__ import annotations

import threading

import torch
from engine_cases import EngineCases, PaddingCases

HOLD_CYCLES = 40_000_000  # about 20 ms: far longer than any call here takes


class OnDevice(PaddingCases, EngineCases):
    """The cases, and order between streams."""

    def test_a_scatter_held_back_is_waited_for(self, engine, device, store):
        plane, index = store(torch.zeros(64, 9)), torch.arange(64, device=device)
        rows, out = torch.zeros(64, 9, device=device), torch.zeros(64, 9, device=device)
        one, two = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            torch.cuda._sleep(HOLD_CYCLES)
            rows.fill_(5)
            engine.scatter([plane], index, [rows])
        with torch.cuda.stream(two):
            engine.gather([plane], index, [out])
        two.synchronize()
        assert out.eq(5).all()
        engine.wait()
        assert plane.eq(5).all()

    def test_a_gather_held_back_sees_the_rows_of_its_time(self, engine, device, store):
        plane, index = store(torch.ones(64, 9)), torch.arange(64, device=device)
        rows, out = torch.full((64, 9), 5.0, device=device), torch.zeros(64, 9, device=device)
        one, two = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            torch.cuda._sleep(HOLD_CYCLES)
            engine.gather([plane], index, [out])
        with torch.cuda.stream(two):
            engine.scatter([plane], index, [rows])
        one.synchronize()
        assert out.eq(1).all()
        engine.wait()
        assert plane.eq(5).all()

    def test_scatters_land_in_order(self, engine, device, store):
        plane, index = store(torch.zeros(64, 9)), torch.arange(64, device=device)
        rows = [torch.full((64, 9), float(i), device=device) for i in range(4)]
        streams = [torch.cuda.Stream() for _ in rows]
        torch.cuda.synchronize()
        for row, stream in zip(rows, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(HOLD_CYCLES // (1 + int(stream is streams[-1]) * 100))
                engine.scatter([plane], index, [row])
        engine.wait()
        assert plane.eq(3).all()

    def test_an_index_held_back_on_the_current_stream(self, engine, device, store):
        content = torch.arange(100.0).view(50, 2)
        plane, other, wanted = store(content), store(torch.zeros(50, 2)), torch.arange(49, -1, -1, device=device)
        out, side = torch.zeros(50, 2, device=device), torch.cuda.Stream()
        indices = [torch.zeros_like(wanted) for _ in range(2)]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            indices[0].copy_(wanted)
            engine.gather([plane], indices[0], [out])
            torch.cuda._sleep(HOLD_CYCLES)
            indices[1].copy_(wanted)
            engine.scatter([other], indices[1], [out])
        side.synchronize()
        assert torch.equal(out.cpu(), content.flip(0))
        engine.wait()
        assert torch.equal(other.cpu(), content)

    def test_memory_of_the_index_is_not_given_away_early(self, engine, device, store):
        content, side = torch.arange(100_000.0).view(50_000, 2), torch.cuda.Stream()
        plane, out = store(content), torch.zeros(50_000, 2, device=device)
        index = torch.arange(50_000, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            engine.gather([plane], index, [out])
        del index
        thieves = [torch.zeros(50_000, dtype=torch.int64, device=device) for _ in range(4)]
        side.synchronize()
        assert torch.equal(out.cpu(), content)
        assert len(thieves) == 4

    def test_memory_of_the_rows_is_not_given_away_early(self, engine, device, store):
        plane, index, side = store(torch.zeros(50_000, 2)), torch.arange(50_000, device=device), torch.cuda.Stream()
        rows = torch.full((50_000, 2), 3.0, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            engine.scatter([plane], index, [rows])
        del rows
        thieves = [torch.zeros(50_000, 2, device=device) for _ in range(4)]
        engine.wait()
        assert plane.eq(3).all()
        assert len(thieves) == 4

    def test_memory_of_a_converted_call_is_not_given_away_early(self, engine, device, store):
        plane, side = store(torch.zeros(50_000, 2).half()), torch.cuda.Stream()
        index, rows = torch.arange(50_000, device=device), torch.full((50_000, 2), 3.0, device=device)
        out = torch.zeros(50_000, 2, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            engine.scatter([plane], index, [rows])
            engine.gather([plane], index, [out])
        del rows, index
        thieves = [torch.zeros(50_000, width, device=device) for width in (1, 2, 2, 4)]
        side.synchronize()
        assert out.eq(3).all()
        engine.wait()
        assert plane.eq(3).all()
        assert len(thieves) == 4

    def test_two_threads(self, engine, device, store):
        plane, errors = store(torch.zeros(200, 5)), []

        def work(first):
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    index = torch.arange(first, 200, 2, device=device)
                    rows = torch.zeros(100, 5, device=device)
                    for _ in range(50):
                        engine.gather([plane], index, [rows])
                        rows += 1
                        engine.scatter([plane], index, [rows])
            except BaseException as error:
                errors.append(error)

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        engine.wait()
        assert plane.eq(50).all()
