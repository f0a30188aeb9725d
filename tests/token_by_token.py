"""A server that is simulated token by token, from the rules in `simulators.serving.scheduler` alone."""

from dataclasses import dataclass, field


@dataclass
class Client:
    number: int
    arrival_ps: int
    prompt: int
    new: int
    got: list = field(default_factory=list)  # when each token came
    cached: int = 0
    pages: int = 0
    target: int = 0
    preemptions: int = 0


def token_by_token(requests, limits, times):
    """Clients after all are served, and rows (start, end, clients that decode, chunk's client or None)."""
    columns = zip(requests.arrival_ps.tolist(), requests.prompt_tokens.tolist(), requests.new_tokens.tolist())
    clients = [Client(number, *row) for number, row in enumerate(columns)]
    coming, waiting, served, steps, now = list(clients), [], [], [], 0
    most_pages = 0

    def needed(tokens):
        pages = 0
        while pages * limits.page_tokens < tokens:
            pages += 1
        return pages

    def free():
        return limits.pages - sum(client.pages for client in served)

    while coming or waiting or served:
        while coming and coming[0].arrival_ps <= now:
            waiting.append(coming.pop(0))
        if not waiting and not served:
            now = coming[0].arrival_ps
            continue
        for client in list(served):
            if client not in served or client.cached < client.target:
                continue
            while client in served and needed(client.cached + 1) > client.pages:
                if free():
                    client.pages += 1
                    continue
                victim = served.pop()
                victim.pages = victim.cached = victim.target = 0
                victim.preemptions += 1
                waiting.insert(0, victim)
        filling = [client for client in served if client.cached < client.target]
        if waiting and not filling and len(served) < limits.max_batch:
            pages = needed(waiting[0].prompt + len(waiting[0].got))
            if pages <= free():
                client = waiting.pop(0)
                client.pages, client.target, client.cached = pages, client.prompt + len(client.got), 0
                served.append(client)
                filling = [client]
        most_pages = max(most_pages, limits.pages - free())
        decoding = [client for client in served if client not in filling]
        start = now
        if decoding:
            mean = sum(client.cached + 1 for client in decoding) // len(decoding)
            now += int(times.decode_ps[len(decoding)][mean])
        if filling:
            (client,) = filling
            client.cached = min(client.cached + limits.chunk_tokens, client.target)
            now += int(times.chunk_ps[client.cached])
        for client in decoding:
            client.cached += 1
            client.got.append(now)
        for client in filling:
            if client.cached == client.target:
                client.got.append(now)
        steps.append((start, now, tuple(c.number for c in decoding), filling[0].number if filling else None))
        served = [client for client in served if len(client.got) < client.new]
    return clients, steps, most_pages
