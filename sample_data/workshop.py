"""The made-up world behind the sample data: a bicycle workshop, its customers, and the rollouts of its desk agent.

    (case, forks) -> Dice -> look_up, quote, book -> Log: chat messages and the mistakes that cost reward

A rollout is a series of choices: which tool, which wording, which mistake. Choice n is drawn with a seed of the case,
n and the label of the fork in force, so rollouts whose forks agree up to choice n agree word for word up to there:

    a ----+------------------ forks ((0, "a"),)
          +---- b ----------- forks ((0, "a"), (6, "b"))
                  +---- c --- forks ((0, "a"), (6, "b"), (11, "c"))

What becomes of the logs (files, tokens, rewards) is make.py's.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Forks = tuple[tuple[int, str], ...]

TODAY, DEADLINE = "2025-03-11", "2025-03-14"
POLICY = f"""\
You are the desk agent of Millrace Cycles, a bicycle workshop with two branches, Quay Street and Hill Road.
Today is Tuesday {TODAY}. Rules of the desk:
- Look the customer up before you talk about a ticket, and never read one customer's ticket to another.
- Never quote from memory: check the stock of a part first. Prices are in euro.
- Labour costs 0.80 a minute. Members of the club get 10 % off parts, never off labour.
- Book a slot only after the customer has agreed to the price, and never after the day they need the bicycle.
- When a tool reports an error, read it, mend the call and try again once before you ask the customer."""
# name | what it does | parameters (all required; a leading # marks an integer)
TOOLS = """\
find_customer|Find a customer by phone or surname.|field: phone or surname;value: name, or phone as ten digits
get_ticket|Read a repair ticket.|ticket: number such as T-4821
check_stock|Stock and price of a part in one branch.|sku: part number;branch: quay or hill
list_slots|Free workshop slots from a day on.|branch: quay or hill;from: YYYY-MM-DD;#minutes: labour
book_slot|Book a free slot for a ticket.|slot: slot id;ticket: ticket number
send_text|Send a text message to the customer.|phone: ten digits;text: at most 160 characters"""
# symptom | finding | part, sku, price | cheaper part, sku, price | minutes of labour
FAULTS = """\
the chain jumps when I stand up|cassette teeth hooked|alloy cassette,CS-1130,68|steel cassette,CS-1128,44|30
the rear brake hardly bites|rotor below 1.5 mm|rotor and pads,BR-160X,57|organic pads,BR-22,19|45
the cranks click on every turn|bottom bracket worn, play on the left|ceramic bracket,BB-86C,95|bracket,BB-86,32|60
the front wheel wobbles downhill|rim bent, three spokes loose|hand-built wheel,WH-F700,149|new rim,RM-700,48|75
the lowest gear will not go in|hanger bent, cable frayed|hanger and cable set,RD-HG4,41|hanger,RD-HG1,23|30
the dropper post sinks by itself|seal gone, cartridge leaks oil|new cartridge,DP-CT30,72|seal kit,DP-SK,26|60
the hub dynamo gives no light|contact broken, cable pinched|dynamo hub,HB-DY3,118|cable and plug,HB-PL,15|45
the headset turns in steps|lower bearing rusted, race pitted|sealed headset,HS-44S,63|bearing only,HS-41,21|45
the freewheel slips at the lights|pawls worn, grease gone hard|freehub body,FH-11R,84|pawl kit,FH-PK,18|60
the tyre loses its air over night|tubeless tape torn at the valve|tyre and tape,TY-40G,59|tape and valve,TL-25,17|20"""
# question | answer
QUESTIONS = """\
And when do you close?|We are open until 18:00, on Saturday until 13:00.
Do you lend bicycles meanwhile?|Yes, a loan bicycle costs 8 euro a day; ask at the counter.
Can my brother collect it?|Of course, if he shows this text and some proof of identity.
Is there a warranty on the work?|Twelve months on labour; parts carry the warranty of their maker.
May I pay by card?|Card, cash and bank transfer are all welcome.
Could you also check the lights?|The mechanic will look at lamps, tyres and bolts without charge.
What happens to the old parts?|We recycle metal and rubber, unless you want to keep them.
How do I become a member of the club?|Fill in the form on our site; membership is 25 euro a year.
Is there parking near the door?|Two short-stay bays stand opposite, and racks are along the wall.
Do you wash it too?|A quick wash is included; a full clean with wax costs 15 euro extra.
My helmet is cracked, do you sell any?|We stock three brands, from children's sizes to extra large.
How long is the wait on the day?|Usually the bicycle is ready about an hour after the slot ends."""
OPENINGS = (
    "Hello, {name} here, phone {phone}. I left my {bicycle} with you yesterday because {symptom}. What will it cost?",
    "Good morning! My {bicycle} is at your place since Monday: {symptom}. Any news? {name}, {phone}.",
    "Hi, it's {name}. Have you found out yet why {symptom}? It is the {bicycle}; my number is {phone}.",
    "This is {name}, {phone}. I brought in a {bicycle}, as {symptom}. Please tell me what is wrong and the price.",
)
DEADLINES = (
    "I need it back by {day}.",
    "We leave on a tour right after {day}, so it must be ready by then.",
    "My daughter rides a race the morning after {day}; that is the last possible day.",
    "It takes me to work, so please not later than {day}.",
)
PEOPLE = (
    "Ines Okafor,Tomas Lindqvist,Maeve Brannigan,Piotr Zielak,Salma Haddou,Joost Verbeek,Noor Rahmani,Callum Teague,"
    "Elif Aydemir,Rosa Quintela,Henrik Dahlmo,Yuki Tanabe"
)
BICYCLES = ("Corrib Tourer", "Fennel City 8", "Arden Gravel", "Palisade Cargo", "Rook Trail 29", "Swift Audax")


@dataclass(frozen=True)
class Case:
    """What is true of a task, whatever the agent does."""

    seed: str
    name: str
    phone: str
    member: bool
    bicycle: str
    ticket: str
    branch: str
    symptom: str
    finding: str
    parts: tuple[tuple[str, str, int], ...]
    minutes: int

    def price(self, part: int, *, discount: bool) -> str:
        """The whole price of a repair with that part, in euro with cents."""
        return f"{self.parts[part][2] * (0.9 if discount else 1.0) + 0.8 * self.minutes:.2f}"


def make_case(seed: str, index: int) -> Case:
    rng = random.Random(seed)
    symptom, finding, first, second, minutes = FAULTS.splitlines()[index % 10].split("|")
    parts = tuple((name, sku, int(price)) for name, sku, price in (first.split(","), second.split(",")))
    return Case(
        seed=seed,
        name=PEOPLE.split(",")[index],
        phone=f"55501{rng.randrange(10**5):05}",
        member=index % 3 != 2,
        bicycle=rng.choice(BICYCLES),
        ticket=f"T-{rng.randrange(3000, 5000)}",
        branch=rng.choice(("quay", "hill")),
        symptom=symptom,
        finding=finding,
        parts=parts,
        minutes=int(minutes),
    )


class Dice:
    """The choices of one rollout, and how many it has made."""

    def __init__(self, seed: str, forks: Forks) -> None:
        self.seed, self.forks, self.count = seed, forks, 0

    def pick(self, *options: str) -> str:
        label = [label for start, label in self.forks if start <= self.count][-1]
        self.count += 1
        return random.Random(f"{self.seed}/{self.count}/{label}").choice(options)


class Log:
    """A rollout being written, and the mistakes in it that cost reward."""

    def __init__(self, system: str, user: str) -> None:
        self.messages: list[Json] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        self.num_mistakes = 0

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def say(self, text: str, reasoning: str) -> None:
        self.messages.append({"role": "assistant", "content": text, "reasoning_content": reasoning})

    def call(self, reasoning: str, *calls: tuple[str, Json, Json]) -> None:
        """One assistant turn with calls of (tool, arguments, result), then a tool message for each."""
        digest = hashlib.sha256(json.dumps(self.messages).encode()).hexdigest()
        ids = [f"call_{digest[8 * i : 8 * i + 12]}" for i in range(len(calls))]
        tool_calls = [
            {"id": i, "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
            for i, (tool, arguments, _) in zip(ids, calls, strict=True)
        ]
        turn = {"role": "assistant", "content": None, "reasoning_content": reasoning, "tool_calls": tool_calls}
        self.messages.append(turn)
        for i, (tool, _, result) in zip(ids, calls, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": i, "name": tool, "content": json.dumps(result)})


def tool_schemas() -> list[Json]:
    """The six tools of the desk as OpenAI function schemas."""
    schemas = []
    for line in TOOLS.splitlines():
        name, description, parameters = line.split("|")
        pairs = [parameter.split(": ") for parameter in parameters.split(";")]
        properties = {
            key.lstrip("#"): {"type": "integer" if key.startswith("#") else "string", "description": text}
            for key, text in pairs
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": name, "description": description, "parameters": schema}
        schemas.append({"type": "function", "function": function})
    return schemas


def look_up(log: Log, dice: Dice, case: Case) -> None:
    """The customer, then the ticket; a phone with spaces is an error and a retry."""
    surname = case.name.split()[1]
    found = {
        "customer": {"name": case.name, "phone": case.phone, "club_member": case.member},
        "tickets": [{"ticket": case.ticket, "bicycle": case.bicycle, "status": "diagnosed"}],
    }
    why = dice.pick("First I need the record of", "The rules say to look up", "Before anything else I find")
    by = dice.pick("phone", "surname", "spaced")
    if by == "spaced":
        spaced = f"{case.phone[:3]} {case.phone[3:6]} {case.phone[6:]}"
        error = {"error": "invalid_phone", "detail": f"expected ten digits, got '{spaced}'"}
        arguments = {"field": "phone", "value": spaced}
        log.call(f"{why} the customer, by the phone number.", ("find_customer", arguments, error))
        why = dice.pick("The number must have no spaces. Again for", "My format was wrong, so I search anew for")
    field, value = ("surname", surname) if by == "surname" else ("phone", case.phone)
    log.call(
        f"{why} the customer, {case.name}, by {field}.",
        ("find_customer", {"field": field, "value": value}, found),
    )
    ticket = {
        "ticket": case.ticket,
        "bicycle": case.bicycle,
        "branch": case.branch,
        "received": "2025-03-10",
        "finding": case.finding,
        "parts": [{"sku": sku, "name": name} for name, sku, _ in case.parts],
        "labour_minutes": case.minutes,
    }
    look = dice.pick("One open ticket.", f"Found: {case.name}.", "There is exactly one ticket, good.")
    aim = dice.pick("Now the diagnosis.", "I read what the mechanic found.", "Next I open it.")
    log.call(f"{look} {aim}", ("get_ticket", {"ticket": case.ticket}, ticket))


def quote(log: Log, dice: Dice, case: Case, part: int) -> None:
    """Stock of the part, in one branch or both, then the price; the careless get the discount wrong."""
    name, sku, price = case.parts[part]
    count = int(dice.pick("2", "4", "7"))
    stock = {"sku": sku, "branch": case.branch, "in_stock": count, "price": price, "currency": "EUR"}
    good = ("check_stock", {"sku": sku, "branch": case.branch}, stock)
    plan = dice.pick("one", "one", "both", "typo")
    if plan == "typo":
        wrong = sku.replace("-", "")
        error = {"error": "unknown_sku", "sku": wrong, "did_you_mean": [sku]}
        log.call(f"I need the price of the {name}.", ("check_stock", {"sku": wrong, "branch": case.branch}, error))
    start = dice.pick("The ticket names", "The mechanic proposes", "What we need is")
    other = "hill" if case.branch == "quay" else "quay"
    extra = ("check_stock", {"sku": sku, "branch": other}, stock | {"branch": other, "in_stock": 0})
    log.call(
        f"{start} the {name}, {sku}. " + dice.pick("Stock first, then a quote.", "I check that it is there."),
        *((good, extra) if plan == "both" else (good,)),
    )
    careless = dice.pick("no", "no", "no", "yes") == "yes"
    discount = case.member != careless
    log.num_mistakes += careless
    total, labour = case.price(part, discount=discount), f"{0.8 * case.minutes:.2f}"
    status = "a club member, so 10 % off the part" if discount else "no discount to apply"
    parts = f"{price * (0.9 if discount else 1):.2f}"
    if part == 0:
        start = dice.pick("Thank you for waiting: ", "I have the diagnosis: ", f"Good news, {case.name.split()[0]}: ")
        found = start + f"the mechanic noted '{case.finding}'. "
    else:
        found = dice.pick("There is a cheaper way. ", "Yes, though it will not last as long. ", "Certainly. ")
    log.say(
        found
        + dice.pick("I suggest", "The cure is", "We would fit")
        + f" the {name} (in stock). Parts {parts} plus labour {labour} makes {total} euro. "
        + dice.pick("Shall I book it?", "Would you like me to book a slot?", "Is that all right for you?"),
        f"Price {price}, {status}. {parts} + {case.minutes} * 0.80 = {parts} + {labour} = {total}.",
    )


def book(log: Log, dice: Dice, case: Case, *, in_one_go: bool) -> None:
    """The customer's yes, a slot before the deadline (one may be gone by then; the careless book too late), a text.

    In one go, the yes asks for the text too; else it is asked for in a user message after the booking.
    """
    question, answer = dice.pick(*QUESTIONS.splitlines()).split("|")
    yes = dice.pick("Yes, please go ahead.", "All right, book it.", "Fine by me, the sooner the better.")
    log.user(f"{yes} And text me the time, please. {question}" if in_one_go else yes)
    rng = random.Random(case.seed + "slots")
    days = ("2025-03-12", "2025-03-13", DEADLINE, "2025-03-17")
    slots = [
        {"slot": f"S{rng.randrange(100, 999)}", "day": day, "start": f"{rng.randrange(9, 17):02}:{half}"}
        for day, half in zip(days, ("00", "30", "00", "30"), strict=True)
    ]
    arguments = {"branch": case.branch, "from": "2025-03-12", "minutes": case.minutes}
    agreed = dice.pick("The customer agrees.", "That is a yes.", "Agreed, so I may book.")
    log.call(f"{agreed} I look for slots of {case.minutes} minutes.", ("list_slots", arguments, {"slots": slots}))
    chosen = int(dice.pick("0", "1", "1", "2", "3"))
    log.num_mistakes += chosen == 3
    slot = slots[chosen]
    choice = dice.pick(f"{slot['day']} at {slot['start']} fits.", f"I take {slot['slot']}.", "This one looks fine.")
    if chosen < 2 and dice.pick("free", "taken") == "taken":
        error = {"error": "slot_taken", "slot": slot["slot"], "detail": "booked a moment ago"}
        log.call(choice, ("book_slot", {"slot": slot["slot"], "ticket": case.ticket}, error))
        slot = slots[chosen + 1]
        choice = dice.pick("Gone already; the next one", "Somebody was faster. I try the next,") + f" {slot['slot']}."
    booked = {"ok": True, "ticket": case.ticket, **slot, "branch": case.branch}
    log.call(choice, ("book_slot", {"slot": slot["slot"], "ticket": case.ticket}, booked))
    when = f"{slot['day']} at {slot['start']}"
    if not in_one_go:
        ready = "Booked. " + dice.pick("Your", "The") + f" {case.bicycle} goes on the stand on {when}. "
        thanks = dice.pick("Anything else?", "Is there anything else I can do?", "Can I help with more?")
        log.say(ready + thanks, f"Ticket {case.ticket} now has slot {slot['slot']}. Tell the customer.")
        log.user(
            dice.pick(
                "Could you text me that, please?", "Please send it to my phone.", "Great. Send me a text with it?"
            )
            + f" {question}"
        )
    text = dice.pick("Millrace Cycles: ", "Your repair: ") + f"{case.bicycle}, ticket {case.ticket}, {when}."
    sent = {"status": "queued", "to": case.phone, "length": len(text)}
    log.call(
        dice.pick("A text with day and time.", "I send the slot to the number on file."),
        ("send_text", {"phone": case.phone, "text": text}, sent),
    )
    log.say(
        dice.pick("The text is on its way. ", f"Sent to {case.phone}. ", "Done, you should have it now. ")
        + answer
        + dice.pick("", " Have a good ride!", " See you soon at Millrace."),
        dice.pick("Queued, so only the question is left.", "The text is out. I answer the question too."),
    )


def rollout(case: Case, forks: Forks, *, whole: bool) -> tuple[Log, int]:
    """The log and how many choices it took; not `whole` stops at the quote (one user message, two errors at most)."""
    index = int(case.ticket[2:])
    facts = {"name": case.name, "phone": case.phone, "bicycle": case.bicycle, "symptom": case.symptom, "day": DEADLINE}
    opening = f"{OPENINGS[index % 4]} {DEADLINES[index // 4 % 4]}".format(**facts)
    log, dice = Log(POLICY if whole else POLICY[: POLICY.index("\nToday")], opening), Dice(case.seed, forks)
    look_up(log, dice, case)
    quote(log, dice, case, 0)
    if whole:
        dear = dice.pick("no", "no", "yes") == "yes"
        if dear:
            log.user(dice.pick("That is more than I thought. Is there", "Hm. Have you got") + " something cheaper?")
            quote(log, dice, case, 1)
        book(log, dice, case, in_one_go=dear)
    return log, dice.count


def fork_tree(case: Case, num_rollouts: int, *, whole: bool) -> Iterator[Log]:
    """Rollouts of one case, every one after the first forked at a random choice from an earlier one; no two alike."""
    rng = random.Random(case.seed + "forks")
    made: list[tuple[Forks, Log, int]] = []
    while len(made) < num_rollouts:
        forks: Forks = ((0, "0"),)
        if made:
            parent, _, num_choices = rng.choice(made)
            start = rng.randrange(1, num_choices - 1)
            forks = (*(fork for fork in parent if fork[0] < start), (start, str(rng.random())))
        log, num_choices = rollout(case, forks, whole=whole)
        if all(log.messages != other.messages for _, other, _ in made):
            made.append((forks, log, num_choices))
            yield log
