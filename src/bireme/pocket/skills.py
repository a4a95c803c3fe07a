"""Skills of the pocket model: generators of cases whose answers can be checked exactly.

The same generators make the training corpus (``split="train"``) and the evaluation (``split="eval"``). The core of a
case (the operands of a sum, the key and value to recall, the fact and its phrasing, ...) is hashed, and the hash alone
decides which split may use it, so an evaluation case can never have been trained on. ``"dev"`` is a third split, for
steering a training run. Standard library only; everything is a function of the seed.

Use::

    from bireme.pocket.skills import RECALL_DISTANCES, SKILLS, eval_cases, generate

    for case in eval_cases(per_skill=40, seed=0):      # recall: 40 at every distance
        request = {"messages": case.messages, "tools": case.tools,
                   "chat_template_kwargs": {"enable_thinking": case.enable_thinking}}
        ...                                            # greedy; case.max_tokens is enough for every right answer
        right = case.check(content)                    # the answer as text, or the whole raw output of the model
        right = case.check(content, tool_calls)        # or the answer with the tool calls a server parsed from it

``case.check`` takes raw model output (a thought that ends in ``</think>``, XML tool calls, a trailing ``<|im_end|>``)
as well as what an OpenAI-style server makes of it (content without thought, ``tool_calls`` as a list of
``{"function": {"name": ..., "arguments": <JSON text or dict>}}``). ``case.expected`` is the answer as text, for
printing. ``case.group`` names the row of a report: the skill, or for recall ``recall@<distance in tokens>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random
from typing import Any

from bireme.pocket import words

Message = dict[str, Any]
Accept = Callable[[str], bool]
"""Tells whether a case with this core may be used in the split that is being generated."""

RECALL_DISTANCES = (100, 500, 1500, 3000, 6000)
"""Distances in tokens between the pair to recall and the question, reported apart."""

SPLITS = ("train", "dev", "eval")


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation to continue, and what the continuation must be."""

    skill: str
    messages: list[Message]
    expected: str
    """The right answer as text (for a tool call: its XML form)."""
    kind: str = "text"
    """How the answer is compared: ``text`` exactly, ``json`` as a value, ``tool`` as calls with typed arguments."""
    tools: list[dict[str, Any]] | None = None
    enable_thinking: bool = False
    thought: str = ""
    """What the model is trained to write inside ``<think>`` before the answer (not checked)."""
    group: str = ""
    max_tokens: int = 256
    calls: list[dict[str, Any]] = field(default_factory=list)
    """For kind ``tool``: the expected calls, ``{"name": str, "arguments": dict}``."""

    def check(self, answer: str, tool_calls: Sequence[Any] | None = None) -> bool:
        """True if ``answer`` (with ``tool_calls``, where a server parsed them out of it) is the right one."""
        text = final_answer(answer)
        if self.kind == "tool":
            try:
                found = _plain_calls(tool_calls) if tool_calls else parse_tool_calls(text, self.tools or [])
            except (ValueError, KeyError, TypeError, AttributeError):
                return False
            return [_canonical(c) for c in found] == [_canonical(c) for c in self.calls]
        if tool_calls:
            return False
        if self.kind == "json":
            try:
                return _canonical(json.loads(text)) == _canonical(json.loads(self.expected))
            except ValueError:
                return False
        return text == self.expected

    def completion(self) -> str:
        """What the model should write after the generation prompt, up to and including ``<|im_end|>``."""
        head = f"{self.thought}\n</think>\n\n" if self.enable_thinking else ""
        return f"{head}{self.expected}<|im_end|>"


def final_answer(raw: str) -> str:
    """The answer in a model's raw output: what follows the thought, without end markers and outer white space."""
    text = raw.rsplit("</think>", 1)[-1]
    for end in ("<|im_end|>", "<|endoftext|>"):
        text = text.split(end, 1)[0]
    return text.strip()


_CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>\s*(.*?)\s*</function>\s*</tool_call>", re.S)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>", re.S)


def parse_tool_calls(text: str, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls in the Qwen XML form, with arguments typed by the tools' schemas. Raises ValueError on a bad value."""
    types = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
    calls = []
    for name, body in _CALL.findall(text):
        declared = types.get(name, {})
        arguments: dict[str, Any] = {}
        for key, value in _PARAMETER.findall(body):
            is_text = declared.get(key, {}).get("type", "string") == "string"
            arguments[key] = value if is_text else json.loads(value)
        calls.append({"name": name, "arguments": arguments})
    return calls


def tool_call_xml(name: str, arguments: dict[str, Any]) -> str:
    """One call in the Qwen XML form: strings as they are, everything else as JSON."""
    lines = ["<tool_call>", f"<function={name}>"]
    for key, value in arguments.items():
        lines += [f"<parameter={key}>", value if isinstance(value, str) else json.dumps(value), "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


def _plain_calls(tool_calls: Sequence[Any]) -> list[dict[str, Any]]:
    calls = []
    for call in tool_calls:
        function = call.get("function", call)
        arguments = function["arguments"]
        calls.append(
            {"name": function["name"], "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
        )
    return calls


def _canonical(value: Any) -> str:
    """Equal for equal JSON values of equal types (1, 1.0 and true differ), whatever the order of keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic: the sum is worked digit by digit, units first; the result grows to the left after each "|".


def _arithmetic(rng: Random, accept: Accept) -> Case:
    while True:
        a, b = (rng.randrange(10 ** rng.randint(1, 4)) for _ in range(2))
        plus = rng.random() < 0.5
        if not plus and a < b and rng.random() < 0.6:
            a, b = b, a
        if accept(f"arithmetic {a} {plus} {b}"):
            break
    if plus:
        ask = rng.choice(
            ["What is {a} + {b}?", "Compute {a} + {b}.", "Add {a} and {b}.", "{a} + {b} = ?", "Calculate {a} plus {b}."]
        )
        thought = _addition(a, b)
        expected = str(a + b)
    else:
        ask = rng.choice(
            ["What is {a} - {b}?", "Compute {a} - {b}.", "Subtract {b} from {a}.", "{a} - {b} = ?", "{a} minus {b}?"]
        )
        thought = _subtraction(a, b)
        expected = str(a - b)
    return _case("arithmetic", ask.format(a=a, b=b), expected, thought=thought)


def _addition(a: int, b: int) -> str:
    width = max(len(str(a)), len(str(b)))
    x, y = f"{a:0{width}}", f"{b:0{width}}"
    lines, carry, result = [f"{x} + {y}"], 0, ""
    for i in reversed(range(width)):
        total = int(x[i]) + int(y[i]) + carry
        lines_carry, carry = carry, total // 10
        result = f"{total % 10}{result}"
        lines.append(f"{x[i]}+{y[i]}+{lines_carry}={total} carry {carry} | {result}")
    if carry:
        lines.append(f"carry 1 | 1{result}")
    return "\n".join(lines)


def _subtraction(a: int, b: int) -> str:
    big, small = max(a, b), min(a, b)
    width = len(str(big))
    x, y = f"{big:0{width}}", f"{small:0{width}}"
    lines = [f"{a} < {b}, negative" if a < b else f"{a} >= {b}", f"{x} - {y}"]
    borrow, result = 0, ""
    for i in reversed(range(width)):
        difference = int(x[i]) - int(y[i]) - borrow
        lines_borrow, borrow = borrow, int(difference < 0)
        result = f"{difference % 10}{result}"
        lines.append(f"{x[i]}-{y[i]}-{lines_borrow}={difference} borrow {borrow} | {result}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Ordering: insertion sort, one line per number; or the best so far, one line per number.


def _ordering(rng: Random, accept: Accept) -> Case:
    task = rng.choice(["ascending", "descending", "largest", "smallest", "larger", "smaller"])
    while True:
        count = 2 if task in ("larger", "smaller") else rng.randint(3, 6)
        limit = 10 ** rng.choice([1, 2, 2, 3, 3])
        numbers: list[int] = []
        while len(numbers) < count:
            number = rng.randrange(limit)
            if number not in numbers:
                numbers.append(number)
        if accept(f"ordering {task} {numbers}"):
            break
    listed = ", ".join(map(str, numbers))
    if task in ("ascending", "descending"):
        ask = {
            "ascending": ["Sort these numbers in ascending order: {}", "Sort from smallest to largest: {}"],
            "descending": ["Sort these numbers in descending order: {}", "Sort from largest to smallest: {}"],
        }[task]
        lines: list[str] = []
        done: list[int] = []
        for number in numbers:
            done = sorted([*done, number], reverse=task == "descending")
            lines.append(f"{number}: {' '.join(map(str, done))}")
        expected = ", ".join(map(str, done))
    else:
        pick = max if task.startswith("larg") else min
        if count == 2:
            ask = [f"Which number is {task}, {{}}?", f"Which is {task}: {{}}?"]
            listed = f"{numbers[0]} or {numbers[1]}"
        else:
            ask = [f"What is the {task} of these numbers: {{}}?", f"Find the {task} number: {{}}"]
        lines = [f"{number}: {pick(numbers[: i + 1])}" for i, number in enumerate(numbers)]
        expected = str(pick(numbers))
    return _case("ordering", rng.choice(ask).format(listed), expected, thought="\n".join(lines))


# ---------------------------------------------------------------------------------------------------------------------
# Letters and words: the word is spelled out first, since the tokenizer hides its letters from the model.


def _any_word(rng: Random, longest: int) -> str:
    """A real word, or an invented one so that spelling is learned rather than remembered."""
    while True:
        if rng.random() < 0.5:
            word = rng.choice(_REAL_WORDS)
        else:
            word = "".join(
                rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(["", "", "n", "r", "s", "l", "t"])
                for _ in range(rng.randint(2, 4))
            )
        if 3 <= len(word) <= longest:
            return word


_REAL_WORDS = [*words.COMMON, *words.ADJECTIVES, *words.NOUNS, *words.VALUES]


def _letters(rng: Random, accept: Accept) -> Case:
    while True:
        word = _any_word(rng, 12)
        letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("abcdefghijklmnopqrstuvwxyz")
        if accept(f"letters {word} {letter}"):
            break
    ask = rng.choice(
        [
            'How many times does the letter "{l}" appear in "{w}"?',
            'Count the letter "{l}" in "{w}".',
            "How many {l}'s are in the word {w}?",
        ]
    )
    steps = [f"{c}{word[: i + 1].count(letter)}" for i, c in enumerate(word)]
    return _case("letters", ask.format(l=letter, w=word), str(word.count(letter)), thought=" ".join(steps))


def _words(rng: Random, accept: Accept) -> Case:
    task = rng.choice(["reverse", "upper"])
    while True:
        word = _any_word(rng, 9)
        if accept(f"words {task} {word}"):
            break
    if task == "reverse":
        ask = ['Reverse the word "{}".', 'Write "{}" backwards.', 'Spell "{}" in reverse.']
        numbered = [f"{i}{c}" for i, c in enumerate(word, start=1)]
        thought = f"{' '.join(numbered)}\n{' '.join(reversed(numbered))}"
        expected = word[::-1]
    else:
        ask = ['Write "{}" in upper case.', 'Convert "{}" to capital letters.', 'Upper-case the word "{}".']
        thought = " ".join(f"{c}-{c.upper()}" for c in word)
        expected = word.upper()
    return _case("words", rng.choice(ask).format(word), expected, thought=thought)


# ---------------------------------------------------------------------------------------------------------------------
# Copying


def _copy(rng: Random, accept: Accept) -> Case:
    while True:
        parts = []
        for _ in range(rng.randint(2, 10)):
            draw = rng.random()
            if draw < 0.35:
                parts.append(_any_word(rng, 12))
            elif draw < 0.55:
                parts.append(str(rng.randrange(10 ** rng.randint(1, 6))))
            elif draw < 0.75:
                parts.append("".join(rng.choice(words.CJK) for _ in range(rng.randint(1, 5))))
            elif draw < 0.9:
                parts.append("".join(rng.choice(words.EMOJI) for _ in range(rng.randint(1, 3))))
            else:
                parts.append(rng.choice(["->", "(ok)", "#1", "a_b", "100%", "C++", "x=y", "...", "v2.0", "&", "@home"]))
        text = "".join(part + rng.choice([" ", " ", " ", ", ", "", "-"]) for part in parts).strip(" ,-")
        if text and accept(f"copy {text}"):
            break
    ask = rng.choice(
        ['Repeat exactly: "{}"', 'Copy this text exactly: "{}"', 'Say the following back to me: "{}"', 'Echo "{}"']
    )
    return _case("copy", ask.format(text), text, thought="I copy it.")


# ---------------------------------------------------------------------------------------------------------------------
# Recall. A line costs a known number of tokens, which is how a distance in tokens is met without a tokenizer.

WORD_LINE_TOKENS, NUMBER_LINE_TOKENS, QUESTION_TOKENS = 5, 9, 14


def recall_case(rng: Random, accept: Accept, distance: int, asked: int = 1, most_before: int = 300) -> Case:
    """A list of pairs and a question about the pair that ends ``distance`` tokens before the question ends.

    ``asked`` > 1 asks for that many keys at once, which trains retrieval faster than one answer per long list.
    """
    keys = len(words.ADJECTIVES) * len(words.NOUNS)
    while True:
        target = rng.randrange(keys)
        value = _recall_value(rng)
        if accept(f"recall {target} {value}"):
            break
    lines = [(target, value)]
    used = {target}

    def extend(tokens: int) -> list[tuple[int, str]]:
        new = []
        while tokens > 0:
            key = rng.randrange(keys)
            if key in used:
                continue
            used.add(key)
            new.append((key, _recall_value(rng)))
            tokens -= NUMBER_LINE_TOKENS if new[-1][1].isdigit() else WORD_LINE_TOKENS
        return new

    lines = [*extend(rng.randint(0, most_before)), *lines, *extend(distance - QUESTION_TOKENS)]
    shown = "\n".join(f"{_recall_key(key)}: {val}" for key, val in lines)
    if asked > 1:
        chosen = rng.sample(lines, min(asked, len(lines)))
        names = ", ".join(_recall_key(key) for key, _ in chosen)
        ask = f"What are the values of {names}?"
        expected = "\n".join(f"{_recall_key(key)}: {val}" for key, val in chosen)
    else:
        ask = rng.choice(["What is the value of {}?", "Which value belongs to {}?", "Look up {}."])
        ask = ask.format(_recall_key(target))
        expected = value
    intro = rng.choice(["Here is a list of pairs:", "Remember these pairs:", "Read this list:"])
    case = _case("recall", f"{intro}\n{shown}\n\n{ask}", expected, thought=f"Looking for {_recall_key(target)}.")
    return replace(case, enable_thinking=False, group=f"recall@{distance}")


def _recall_key(index: int) -> str:
    return f"{words.ADJECTIVES[index // len(words.NOUNS)]}-{words.NOUNS[index % len(words.NOUNS)]}"


def _recall_value(rng: Random) -> str:
    return rng.choice(words.VALUES) if rng.random() < 0.5 else str(rng.randint(1000, 9999))


def _recall(rng: Random, accept: Accept) -> Case:
    """For training: any distance up to a little over the largest reported one, short ones as often as long ones."""
    distance = round(40 * (6400 / 40) ** rng.random())
    asked = 1 if rng.random() < 0.5 else rng.randint(2, 12)
    return recall_case(rng, accept, distance, asked)


# ---------------------------------------------------------------------------------------------------------------------
# Facts: every fact is trained, but some of its phrasings are kept for evaluation.

_FACT_PHRASINGS = {
    "capital": [
        "What is the capital of {}?", "Name the capital city of {}.", "Which city is the capital of {}?",
        "Tell me the capital of {}.", "Do you know the capital of {}?", "Capital of {}?", "What's the capital of {}?",
        "I need to know the capital of {}.", "{}: what is its capital?", "Which city is the seat of government of {}?",
    ],
    "country": [
        "{} is the capital of which country?", "Which country has {} as its capital?",
        "Of which country is {} the capital?", "Name the country whose capital is {}.",
    ],
    "element": [
        "What is the chemical symbol for {}?", "Give the symbol of the element {}.", "Chemical symbol of {}?",
        "How is {} written in the periodic table?", "Which symbol stands for {}?", "What's the symbol for {}?",
        "Tell me the chemical symbol of {}.",
    ],
    "symbol": [
        "Which element has the symbol {}?", "What element does {} stand for?", "Name the element with the symbol {}.",
        "In chemistry, what is {}?",
    ],
    "opposite": [
        'What is the opposite of "{}"?', 'Give the opposite of "{}".', 'Opposite of "{}"?',
        'What is the antonym of "{}"?', 'Name a word that means the opposite of "{}".', "What's the opposite of {}?",
        "Tell me the opposite of {}.",
    ],
}  # fmt: skip

FACTS: list[tuple[str, str, str]] = [
    *(("capital", country, city) for country, city in words.CAPITALS.items()),
    *(("country", city, country) for country, city in words.CAPITALS.items()),
    *(("element", element, symbol) for element, symbol in words.ELEMENTS.items()),
    *(("symbol", symbol, element) for element, symbol in words.ELEMENTS.items()),
    *(("opposite", word, other) for word, other in words.OPPOSITES.items()),
]
"""(kind, what is asked about, answer); the 150 facts, those that can be asked both ways twice."""


def _facts(rng: Random, accept: Accept) -> Case:
    while True:
        kind, subject, answer = rng.choice(FACTS)
        phrasing = rng.choice(_FACT_PHRASINGS[kind])
        if accept(f"facts {subject} {phrasing}"):
            break
    affix = rng.choice(["{}", "{}", "{}", "{} Answer briefly.", "Quick question: {}", "Please answer: {}"])
    return _case("facts", affix.format(phrasing.format(subject)), answer, thought=f"This is about {subject}.")


# ---------------------------------------------------------------------------------------------------------------------
# Stories


def _stories(rng: Random, accept: Accept) -> Case:
    while True:
        people = rng.sample(words.NAMES, rng.randint(2, 3))
        objects = rng.sample(words.OBJECTS, rng.randint(1, 3))
        places = rng.sample(words.PLACES, 3)
        holder: dict[str, str] = {}
        spot: dict[str, str] = {}
        where: dict[str, str] = {}
        giver: dict[str, tuple[str, str]] = {}
        story = []
        for _ in range(rng.randint(3, 8)):
            person, thing = rng.choice(people), rng.choice(objects)
            owner = holder.get(thing)
            draw = rng.random()
            if draw < 0.4:
                where[person] = rng.choice(places)
                story.append(f"{person} {rng.choice(['went to', 'walked to', 'moved to'])} the {where[person]}.")
            elif owner is None:
                holder[thing] = person
                spot.pop(thing, None)
                story.append(f"{person} {rng.choice(['took', 'picked up', 'found'])} the {thing}.")
            elif draw < 0.75:
                receiver = rng.choice([p for p in people if p != owner])
                holder[thing] = receiver
                giver[thing] = (owner, receiver)
                story.append(f"{owner} {rng.choice(['gave', 'handed'])} the {thing} to {receiver}.")
            else:
                del holder[thing]
                spot[thing] = rng.choice(places)
                story.append(f"{owner} left the {thing} in the {spot[thing]}.")
        questions = [
            *((f"{rng.choice(['Who has', 'Who had'])} the {o}{rng.choice(['', ' at the end'])}?", p)
              for o, p in holder.items()),
            *((f"Where is the {o}?", p) for o, p in spot.items()),
            *((f"Where is {p}?", place) for p, place in where.items()),
            *((f"Who gave the {o} to {receiver}?", owner) for o, (owner, receiver) in giver.items()
              if holder.get(o) == receiver),
        ]  # fmt: skip
        if not questions:
            continue
        question, answer = rng.choice(questions)
        text = f"{' '.join(story)} {question}"
        if accept(f"stories {text}"):
            break
    return _case("stories", text, answer, thought="The last mention counts.")


# ---------------------------------------------------------------------------------------------------------------------
# Tools: a fixed set with natural requests, and invented ones that are described only in the prompt.

_T_CITY, _T_NAME, _T_SMALL, _T_DECIMAL, _T_FLAG, _T_WORD, _T_FOOD = (
    "city", "name", "small", "decimal", "flag", "word", "food",
)  # fmt: skip
_JSON_TYPES = {_T_SMALL: "integer", _T_DECIMAL: "number", _T_FLAG: "boolean"}

_TOOLS: list[tuple[str, str, dict[str, str], list[str], str]] = [
    # name, description, parameters, requests, the result's field and how it is told
    ("get_weather", "Get the current weather of a city.", {"city": _T_CITY},
     ["What is the weather in {city}?", "How is the weather in {city} today?"],
     "sky:sunny,cloudy,rainy,windy|The weather in {city} is {sky}."),
    ("get_temperature", "Get the temperature of a city in degrees.", {"city": _T_CITY},
     ["How warm is it in {city}?", "Tell me the temperature in {city}."],
     "degrees:int|It is {degrees} degrees in {city}."),
    ("set_alarm", "Set an alarm.", {"hour": _T_SMALL, "minute": _T_SMALL},
     ["Set an alarm for hour {hour}, minute {minute}.", "Wake me at hour {hour} and minute {minute}."],
     "alarm_id:int|The alarm is set with id {alarm_id}."),
    ("send_message", "Send a message to a person.", {"to": _T_NAME, "text": _T_WORD},
     ['Send "{text}" to {to}.', 'Write to {to}: "{text}".'],
     "status:sent,queued,failed|The message to {to} is {status}."),
    ("convert_currency", "Convert an amount of money.", {"amount": _T_DECIMAL, "currency": _T_WORD},
     ["Convert {amount} to {currency}.", "How much is {amount} in {currency}?"],
     "result:int|That is {result} in {currency}."),
    ("order_food", "Order food for delivery.", {"dish": _T_FOOD, "count": _T_SMALL},
     ["Order {count} portions of {dish}.", "I want {count} times {dish}, please."],
     "minutes:int|Your {dish} arrives in {minutes} minutes."),
    ("book_hotel", "Book a hotel room.", {"city": _T_CITY, "nights": _T_SMALL, "breakfast": _T_FLAG},
     ["Book a hotel in {city} for {nights} nights, breakfast {breakfast}.",
      "I need a room in {city}, {nights} nights, breakfast {breakfast}."],
     "price:int|The room in {city} costs {price}."),
    ("set_light", "Set the light of a room.", {"room": _T_WORD, "level": _T_SMALL, "warm": _T_FLAG},
     ["Set the light in the {room} to {level}, warm {warm}.", "Light in the {room}: level {level}, warm {warm}."],
     "status:on,dim,off|The light in the {room} is {status}."),
    ("find_flight", "Find a flight between two cities.", {"origin": _T_CITY, "destination": _T_CITY},
     ["Find a flight from {origin} to {destination}.", "I want to fly from {origin} to {destination}."],
     "price:int|The flight to {destination} costs {price}."),
    ("get_stock", "Get the stock of an item in the shop.", {"item": _T_WORD},
     ["How many items of {item} are in stock?", "Check the stock of {item}."],
     "count:int|There are {count} of {item} in stock."),
    ("add_expense", "Add an expense.", {"label": _T_WORD, "amount": _T_DECIMAL},
     ["Add an expense of {amount} for {label}.", "I paid {amount} for {label}, note it."],
     "total:int|Your total is now {total}."),
    ("play_song", "Play a song by an artist.", {"artist": _T_NAME, "loud": _T_FLAG},
     ["Play a song by {artist}, loud {loud}.", "Put on {artist}, loud {loud}."],
     "song:river,summer,shadow,morning|Now playing {song} by {artist}."),
    ("find_person", "Find out where a person is.", {"name": _T_NAME},
     ["Where is {name}?", "Find {name} for me."],
     "place:office,garden,kitchen,park|{name} is in the {place}."),
    ("start_timer", "Start a timer.", {"minutes": _T_SMALL},
     ["Start a timer for {minutes} minutes.", "Set the timer to {minutes} minutes."],
     "timer_id:int|Timer {timer_id} is running."),
]  # fmt: skip

_VERBS = ["get", "set", "find", "open", "check", "update", "create", "remove", "start", "stop", "count", "read"]


def _argument(rng: Random, kind: str) -> Any:
    if kind == _T_CITY:
        return rng.choice(words.CITIES)
    if kind == _T_NAME:
        return rng.choice(words.NAMES)
    if kind == _T_FOOD:
        return rng.choice(words.FOODS)
    if kind == _T_SMALL:
        return rng.randrange(10 ** rng.randint(1, 3))
    if kind == _T_DECIMAL:
        return rng.randrange(1000) + rng.choice([0.25, 0.5, 0.75, 0.1, 0.9])
    if kind == _T_FLAG:
        return rng.random() < 0.5
    return rng.choice(words.COMMON)


def _said(value: Any) -> str:
    """How a user says a value."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _schema(name: str, description: str, parameters: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": _JSON_TYPES.get(kind, "string")} for key, kind in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
        },
    }


def _invented_tool(rng: Random) -> tuple[str, str, dict[str, str], list[str], str]:
    noun = rng.choice(words.COMMON)
    name = f"{rng.choice(_VERBS)}_{noun}"
    kinds = [_T_SMALL, _T_DECIMAL, _T_FLAG, _T_WORD, _T_WORD, _T_NAME]
    parameters = {key: rng.choice(kinds) for key in rng.sample(words.VALUES, rng.randint(1, 3))}
    listed = " and ".join(f"{key} {{{key}}}" for key in parameters)
    result = rng.choice(words.NOUNS)
    return (
        name,
        f"Tool for the {noun}.",
        parameters,
        [f"Use {name} with {listed}.", f"Please call {name}: {listed}.", f"Run {name} with {listed} for me."],
        f"{result}:{rng.choice(['int', 'word'])}|The {result} is {{{result}}}.",
    )


def _tool_request(
    rng: Random, accept: Accept, skill: str
) -> tuple[list[dict[str, Any]], str, str, dict[str, Any], str]:
    """Offered tools, the user's request, and the one call (name, arguments) and result form that fit it."""
    while True:
        offered = [rng.choice(_TOOLS) if rng.random() < 0.6 else _invented_tool(rng) for _ in range(rng.randint(1, 3))]
        offered = list({tool[0]: tool for tool in offered}.values())
        name, _, parameters, requests, result = rng.choice(offered)
        arguments = {key: _argument(rng, kind) for key, kind in parameters.items()}
        if accept(f"{skill} {name} {arguments}"):
            break
    request = rng.choice(requests).format(**{key: _said(value) for key, value in arguments.items()})
    return [_schema(*tool[:3]) for tool in offered], request, name, arguments, result


def _tool_call(rng: Random, accept: Accept) -> Case:
    tools, request, name, arguments, _ = _tool_request(rng, accept, "tool_call")
    case = _case("tool_call", request, tool_call_xml(name, arguments), thought=f"I need {name}.")
    return replace(case, kind="tool", tools=tools, calls=[{"name": name, "arguments": arguments}])


def _tool_answer(rng: Random, accept: Accept) -> Case:
    tools, request, name, arguments, result = _tool_request(rng, accept, "tool_answer")
    field_spec, sentence = result.split("|")
    key, values = field_spec.split(":")
    value: Any
    if values == "int":
        value = rng.randrange(10 ** rng.randint(1, 3))
    elif values == "word":
        value = rng.choice(words.COMMON)
    else:
        value = rng.choice(values.split(","))
    fields = [(key, value), *((k, rng.choice(words.COMMON)) for k in rng.sample(["source", "note", "mode"], 1))]
    rng.shuffle(fields)
    response = json.dumps(dict(fields))
    case = _case("tool_answer", request, sentence.format(**{**arguments, key: value}), thought=f"The {key} is {value}.")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    turns = [
        *case.messages,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": response},
    ]
    return replace(case, messages=turns, tools=tools)


# ---------------------------------------------------------------------------------------------------------------------
# JSON

_JSON_KEYS = {
    "city": "string", "color": "string", "job": "string", "pet": "string", "food": "string", "title": "string",
    "place": "string", "brand": "string", "name": "name", "owner": "name", "age": "integer", "count": "integer",
    "size": "integer", "level": "integer", "year": "integer", "price": "number", "weight": "number", "score": "number",
    "active": "boolean", "open": "boolean", "ready": "boolean", "paid": "boolean", "tags": "list of strings",
    "items": "list of strings", "codes": "list of integers", "points": "list of integers",
}  # fmt: skip


def _json_field(rng: Random, key: str) -> tuple[str, Any, str]:
    """The described type, the value, and how the value is said."""
    kind = _JSON_KEYS[key]
    value: Any
    if kind == "name":
        return "string", (value := rng.choice(words.NAMES)), value
    if kind == "integer":
        return kind, (value := rng.randrange(10 ** rng.randint(1, 4))), str(value)
    if kind == "number":
        return kind, (value := rng.randrange(100) + rng.choice([0.5, 0.25, 0.75])), str(value)
    if kind == "boolean":
        return kind, (value := rng.random() < 0.5), "yes" if value else "no"
    if kind == "list of strings":
        return kind, (value := rng.sample(words.COMMON, rng.randint(1, 3))), " and ".join(value)
    if kind == "list of integers":
        return kind, (value := [rng.randrange(100) for _ in range(rng.randint(1, 3))]), " and ".join(map(str, value))
    return kind, (value := rng.choice(words.COMMON)), value


def _json(rng: Random, accept: Accept) -> Case:
    while True:
        keys = rng.sample(list(_JSON_KEYS), rng.randint(2, 5))
        fields = {key: _json_field(rng, key) for key in keys}
        nested = rng.sample(words.NOUNS, 1)[0] if len(keys) > 2 and rng.random() < 0.25 else ""
        value: dict[str, Any] = {key: item[1] for key, item in fields.items()}
        shape = [f'"{key}" ({item[0]})' for key, item in fields.items()]
        if nested:
            value = {keys[0]: value[keys[0]], nested: {key: value[key] for key in keys[1:]}}
            shape = [shape[0], f'"{nested}" (object with {", ".join(shape[1:])})']
        expected = json.dumps(value)
        if accept(f"json {expected}"):
            break
    said = [f"{key} is {item[2]}" for key, item in fields.items()]
    if rng.random() < 0.5:
        rng.shuffle(said)
    ask = rng.choice(["Write a JSON object with {} for this: {}.", "Make JSON with {}. Data: {}.", "JSON with {}: {}."])
    case = _case("json", ask.format(", ".join(shape), ", ".join(said)), expected, thought="I write one JSON object.")
    return replace(case, kind="json")


# ---------------------------------------------------------------------------------------------------------------------
# Dialogue

_TRAITS: dict[str, tuple[list[str], list[str], str, list[str]]] = {
    # values, statements, acknowledgement, questions; the answer is the acknowledgement's claim
    "name": (words.NAMES, ["My name is {}.", "Hi, I am {}.", "Call me {}."], "your name is {}",
             ["What is my name?", "Who am I?", "Do you remember my name?"]),
    "city": (words.CITIES, ["I live in {}.", "My home is in {}.", "I moved to {}."], "you live in {}",
             ["Where do I live?", "Which city do I live in?", "In which city is my home?"]),
    "colour": (words.COLOURS, ["My favourite colour is {}.", "I like the colour {} most."],
               "your favourite colour is {}", ["What is my favourite colour?", "Which colour do I like most?"]),
    "food": (words.FOODS, ["I love to eat {}.", "My favourite food is {}."], "your favourite food is {}",
             ["What do I love to eat?", "What is my favourite food?"]),
    "pet": (words.ANIMALS, ["I have a {}.", "My pet is a {}."], "your pet is a {}",
            ["What pet do I have?", "Which animal do I have?"]),
    "job": (words.JOBS, ["I work as a {}.", "I am a {} by profession."], "you work as a {}",
            ["What is my job?", "What do I work as?"]),
}  # fmt: skip


def _dialogue(rng: Random, accept: Accept) -> Case:
    while True:
        known: dict[str, str] = {}
        turns: list[tuple[str, str]] = []
        for _ in range(rng.randint(2, 5)):
            if turns and rng.random() < 0.25:
                kind, subject, fact = rng.choice(FACTS)
                phrasing = rng.choice(_FACT_PHRASINGS[kind])
                if split_of(f"facts {subject} {phrasing}") == "train":  # a history must not show what facts keep back
                    turns.append((phrasing.format(subject), fact))
                continue
            trait = rng.choice(list(_TRAITS))
            values, statements, claim, _ = _TRAITS[trait]
            change = trait in known
            known[trait] = rng.choice(values)
            statement = rng.choice(statements).format(known[trait])
            turns.append((f"Correction: {statement}" if change else statement, f"I see, {claim.format(known[trait])}."))
        if not turns:
            continue
        draw = rng.random()
        if draw < 0.75 and known:
            trait = rng.choice(list(known))
            _, _, claim, questions = _TRAITS[trait]
            question = rng.choice(questions)
            answer = claim.format(known[trait])
            answer = f"{answer[0].upper()}{answer[1:]}."
        elif draw < 0.9:
            question, answer = rng.choice(["What was my first message?", "What did I say first?"]), turns[0][0]
        else:
            question, answer = rng.choice(["Repeat your last answer.", "Say that again."]), turns[-1][1]
        if accept(f"dialogue {turns} {question}"):
            break
    case = _case("dialogue", question, answer, thought="I look back in our talk.")
    history = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return replace(case, messages=[*history, *case.messages])


# ---------------------------------------------------------------------------------------------------------------------
# Small talk: trained so that a first "Hello" gets an answer, not evaluated.

_SMALL_TALK = [
    (["Hello!", "Hi", "Hello there", "Hey!", "Good morning!", "hello"], "Hello! How can I help you?"),
    (["Who are you?", "What are you?", "What is your name?", "Introduce yourself."],
     "I am the Bireme pocket model, a very small language model."),
    (["What can you do?", "Help", "How can you help me?", "What are you able to do?"],
     "I can calculate, sort, spell, copy, look up pairs, recall facts, write JSON and call tools."),
    (["Thanks!", "Thank you.", "Thank you very much!"], "You are welcome!"),
    (["Bye", "Goodbye!", "See you later."], "Goodbye!"),
    (["How are you?", "How do you do?", "Are you well?"], "I am well, thank you."),
    (["Write a poem.", "Tell me a joke.", "What is the meaning of life?", "Write some code.", "Who won the match?",
      "Explain quantum physics.", "What happened yesterday?", "Translate this sentence.", "Give me advice."],
     "I am too small to know that."),
]  # fmt: skip


def _small_talk(rng: Random, accept: Accept) -> Case:
    asks, answer = rng.choice(_SMALL_TALK)
    return _case("small_talk", rng.choice(asks), answer, thought="I answer politely.")


# ---------------------------------------------------------------------------------------------------------------------
# Putting cases together

_GENERATORS: dict[str, Callable[[Random, Accept], Case]] = {
    "arithmetic": _arithmetic,
    "ordering": _ordering,
    "letters": _letters,
    "words": _words,
    "copy": _copy,
    "recall": _recall,
    "facts": _facts,
    "stories": _stories,
    "tool_call": _tool_call,
    "tool_answer": _tool_answer,
    "json": _json,
    "dialogue": _dialogue,
    "small_talk": _small_talk,
}
SKILLS = tuple(name for name in _GENERATORS if name != "small_talk")
"""The evaluated skills, in the order of a report."""

TRAINED = tuple(_GENERATORS)
"""The trained skills: the evaluated ones and small talk."""

_THOUGHTFUL = {"arithmetic", "ordering", "letters", "words"}
"""Skills that are worked inside ``<think>``; the others are asked with thinking off."""

_SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a careful assistant. Answer exactly and briefly.",
    "Answer the user's question.",
    "You are Bireme, a small language model.",
]


def split_of(core: str) -> str:
    """The split that alone may use a case with this core: 8 % eval, 4 % dev, the rest train."""
    draw = int.from_bytes(blake2b(core.encode(), digest_size=4).digest(), "little") % 100
    return "eval" if draw < 8 else "dev" if draw < 12 else "train"


def _accept(split: str) -> Accept:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: one of {', '.join(SPLITS)}")
    return lambda core: split_of(core) == split


def _case(skill: str, user: str, expected: str, thought: str = "") -> Case:
    return Case(
        skill, [{"role": "user", "content": user}], expected, thought=thought, enable_thinking=skill in _THOUGHTFUL,
        group=skill,
    )  # fmt: skip


def _with_system(rng: Random, case: Case) -> Case:
    if rng.random() < 0.7:
        return case
    return replace(case, messages=[{"role": "system", "content": rng.choice(_SYSTEM_PROMPTS)}, *case.messages])


def generate(skill: str, split: str, seed: int, distance: int | None = None) -> Iterator[Case]:
    """An endless stream of cases of one skill; ``distance`` (recall only) fixes the distance in tokens."""
    if skill not in _GENERATORS:
        raise ValueError(f"unknown skill {skill!r}: one of {', '.join(TRAINED)}")
    rng, accept = Random(f"{seed} {skill} {split} {distance}"), _accept(split)
    while True:
        case = _GENERATORS[skill](rng, accept) if distance is None else recall_case(rng, accept, distance)
        yield _with_system(rng, case)


def eval_cases(per_skill: int = 40, seed: int = 0, skills: Sequence[str] = SKILLS, split: str = "eval") -> list[Case]:
    """``per_skill`` different cases of each skill; for recall, that many at each of ``RECALL_DISTANCES``."""
    cases: list[Case] = []
    for skill in skills:
        for distance in RECALL_DISTANCES if skill == "recall" else (None,):
            stream = generate(skill, split, seed, distance)
            seen: set[str] = set()
            while len(seen) < per_skill:
                case = next(stream)
                if (key := repr(case.messages)) not in seen:
                    seen.add(key)
                    cases.append(case)
    return cases


def training_case(rng: Random, skill: str) -> Case:
    """A case of the train split. Thinking is sometimes turned the other way, so that both prompts get an answer."""
    case = _with_system(rng, _GENERATORS[skill](rng, _TRAIN))
    if rng.random() < (0.04 if skill in _THOUGHTFUL else 0.12):
        case = replace(case, enable_thinking=not case.enable_thinking)
    return case


_TRAIN = _accept("train")
