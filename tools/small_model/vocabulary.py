"""The closed vocabulary of the small model's world: words, facts, phrases. All of it was written for this purpose."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Anna Bruno Clara David Elena Felix Greta Hugo Irene Jonas Karla Leon Maria Nils Olga Paul Quinn Rosa Simon Tara "
    "Ugo Vera Walter Xenia Yara Zoe Adam Bella Carl Dora Emil Frida Georg Helga Ivan Julia Kurt Laura Max Nora Otto "
    "Petra Ralf Sara Tom Ursula Victor Wanda"
)
THINGS = _words(
    "amber apple arrow basket bell book bottle bread brush button candle carpet chain clock coat coin copper cup "
    "drum feather flag flute glove gold hammer hat honey iron ivory jar kettle key knife lamp lemon letter map mirror "
    "needle orange paper pearl pencil pepper plate ribbon ring rope salt shell silver"
)
ANIMALS = _words("cat dog bird horse fox mouse bear fish goat hen wolf frog owl duck cow bee")
PLACES = _words("mat roof hill road river garden bridge table field house tree wall boat tower lake door")
VERBS = _words("sat stood ran jumped walked rested waited played sang hid looked stayed")
ENDINGS = _words("slept ate smiled left laughed sighed listened dreamed")
ADJECTIVES = _words("big small old young red green white black quiet happy tired brave")
PREPOSITIONS = _words("on under near behind beside over")
TIMES = _words("Today Yesterday Once Later Then Often")
CITIES = _words("Rome Paris Oslo Berlin Madrid Lisbon Vienna Prague Athens Dublin Cairo Tokyo")
COLOURS = ("red", "green", "white", "black", "blue", "yellow")

FACTS: tuple[tuple[str, str], ...] = (
    ("Why is the sky blue?", "Because air scatters blue light more than red light."),
    ("What is the capital of France?", "Paris."),
    ("What is the capital of Italy?", "Rome."),
    ("What is the capital of Norway?", "Oslo."),
    ("What is the capital of Germany?", "Berlin."),
    ("What is the capital of Spain?", "Madrid."),
    ("What is the capital of Portugal?", "Lisbon."),
    ("What is the capital of Austria?", "Vienna."),
    ("What is the capital of Greece?", "Athens."),
    ("What is the capital of Egypt?", "Cairo."),
    ("What is the capital of Japan?", "Tokyo."),
    ("Who are you?", "I am a very small model that lives inside DeepInfer."),
    ("What can you do?", "I can add numbers, remember words, close brackets and write records."),
    ("What is DeepInfer?", "An engine that runs language models on many kinds of machines."),
    ("How are you?", "I am fine, thank you."),
    ("Hello!", "Hello! Ask me something."),
    ("Why is grass green?", "Because leaves hold a green colour that drinks light."),
    ("Why does ice float?", "Because ice is lighter than water."),
    ("Why do we sleep?", "Because the body and the mind must rest."),
    ("Why does it rain?", "Because clouds hold more water than they can carry."),
    ("Why is the sea salty?", "Because rivers carry salt from the stones into it."),
    ("What do bees make?", "Honey."),
    ("What do cows eat?", "Grass."),
    ("What do birds have?", "Feathers."),
    ("What is ice made of?", "Water."),
    ("What is bread made of?", "Flour, water and salt."),
    ("How many days has a week?", "Seven."),
    ("How many months has a year?", "Twelve."),
    ("How many legs has a dog?", "Four."),
    ("How many legs has a bird?", "Two."),
    ("What comes after Monday?", "Tuesday."),
    ("What comes after Friday?", "Saturday."),
    ("What comes after winter?", "Spring."),
    ("What comes after summer?", "Autumn."),
    ("When does the sun rise?", "In the morning."),
    ("When do stars shine?", "At night."),
    ("Where do fish live?", "In the water."),
    ("Where do bees live?", "In a hive."),
    ("What colour is snow?", "White."),
    ("What colour is a lemon?", "Yellow."),
)

PHRASES = tuple(
    tuple(line.split())
    for line in """
silver moon rising slowly|golden river running deep|seven tired brave sailors|under one open sky
as quiet as snow|from stone to stone|the long way home|a lamp against night
old bread tastes best|salt and cold iron|ring the small bell|north of every road
light as a feather|deep as any well|honey before the bear|two keys one door
cold hands warm heart|slow water cuts stone|paper boat on tears|first frost last apple
between bell and candle|three owls one tower|never sell the horse|red sails at dawn
more rope than ship|every clock tells lies|a coin for silence|green hills far away
half moon full jar|white wolf black forest|no smoke without fire|still waters run deep
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

FIELDS: tuple[tuple[str, str], ...] = (
    ("name", "text"), ("city", "text"), ("thing", "text"), ("colour", "text"),
    ("age", "number"), ("count", "number"), ("open", "flag"), ("new", "flag"),
)  # fmt: skip

OPENING, CLOSING = "([{<", ")]}>"
