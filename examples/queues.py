"""A queue that loses nothing: three workers share the orders, one message fails twice, and every result is there once."""

import asyncio
import tempfile
from pathlib import Path

import holdfast
from holdfast import Empty, Requeue


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with holdfast.open(str(Path(folder, "team.db"))) as store:
            sender = store.space("contoso", agent="sender")
            await sender.queue("orders").put_many(range(20))
            await sender.queue("orders").put("urgent", priority=9)
            failures = iter(range(2))

            async def work(name: str) -> None:
                again = Requeue(attempts=3, backoff="10ms")
                queue = store.space("contoso", agent=name).queue("orders", on_error=again)
                while True:
                    try:
                        async with queue.reserve(wait="300ms") as message:
                            if message.body == 13 and next(failures, None) is not None:
                                raise ConnectionError("the exchange is away")
                            await message.complete({"order": message.body, "by": name}, to="done")
                    except ConnectionError:
                        pass  # it comes again after a moment
                    except Empty:
                        return

            await asyncio.gather(*(work(f"worker-{number}") for number in range(3)))
            done = [message.body["order"] for message in await sender.queue("done").peek(100)]
            print("the urgent one came first:", done[0] == "urgent")
            print("done:", len(done), "each once:", len(set(map(str, done))) == 21)
            print("left:", (await sender.queue("orders").stats()).message_count)


asyncio.run(main())
