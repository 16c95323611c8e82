"""What the demo model learns by heart: tables of facts with their phrasings; and word lists for everything else."""

from __future__ import annotations

from typing import NamedTuple


class Table(NamedTuple):
    """One kind of fact. `rows` are (x, y) pairs; every question and the answer are templates of x and y.

    An x like "days|a week" is also offered to the templates as its halves, p ("days") and w ("a week").
    """

    name: str
    json_key: str
    answer: str
    questions: tuple[str, ...]
    follow_ups: tuple[str, ...]  # how people ask the same of another x ("And of Spain?"); empty where nobody would
    rows: tuple[tuple[str, str], ...]


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """"France=Paris, Japan=Tokyo" -> (("France", "Paris"), ("Japan", "Tokyo"))."""
    out = []
    for item in text.replace("\n", " ").split(","):
        x, y = item.split("=")
        out.append((x.strip(), y.strip()))
    return tuple(out)


_CAPITALS = pairs("""France=Paris, Germany=Berlin, Italy=Rome, Spain=Madrid, Portugal=Lisbon, England=London,
Ireland=Dublin, Scotland=Edinburgh, Austria=Vienna, Switzerland=Bern, Belgium=Brussels, the Netherlands=Amsterdam,
Denmark=Copenhagen, Norway=Oslo, Sweden=Stockholm, Finland=Helsinki, Iceland=Reykjavik, Poland=Warsaw,
Hungary=Budapest, Greece=Athens, Turkey=Ankara, Russia=Moscow, Ukraine=Kyiv, Romania=Bucharest, Bulgaria=Sofia,
Croatia=Zagreb, Serbia=Belgrade, Egypt=Cairo, Morocco=Rabat, Kenya=Nairobi, Ghana=Accra, Japan=Tokyo, China=Beijing,
India=New Delhi, Thailand=Bangkok, Vietnam=Hanoi, South Korea=Seoul, Iran=Tehran, Iraq=Baghdad, Canada=Ottawa,
the United States=Washington, Mexico=Mexico City, Cuba=Havana, Brazil=Brasilia, Argentina=Buenos Aires,
Chile=Santiago, Peru=Lima, Colombia=Bogota, Australia=Canberra, New Zealand=Wellington""")

_OPPOSITES = pairs("""hot=cold, big=small, tall=short, fast=slow, happy=sad, day=night, up=down, left=right,
open=closed, full=empty, light=dark, hard=soft, rich=poor, young=old, strong=weak, loud=quiet, wet=dry, clean=dirty,
early=late, good=bad, heavy=light, first=last, inside=outside, love=hate, north=south, east=west, true=false""")

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
"November",
           "December")
_PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def words(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(" ".join(word.split()) for word in text.split(separator))


def _next(items: tuple[str, ...], step: int) -> tuple[tuple[str, str], ...]:
    return tuple((item, items[(i + step) % len(items)]) for i, item in enumerate(items))


def _unique(rows: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Both directions of every pair; where a word would get two answers, the first pair keeps it."""
    table: dict[str, str] = {}
    for x, y in rows:
        table.setdefault(x, y)
        table.setdefault(y, x)
    return tuple(table.items())


TABLES: tuple[Table, ...] = (
    Table("capital", "capital", "The capital of {x} is {y}.",
          ("What is the capital of {x}?", "What's the capital of {x}?", "Which city is the capital of {x}?",
           "Tell me the capital of {x}.", "Capital of {x}?", "Name the capital of {x}.",
           "Do you know the capital of {x}?", "What is the capital city of {x}?",
           "What city is the capital of {x}?", "The capital of {x} is?", "I want to know the capital of {x}.",
           "Can you name the capital of {x}?"),
          ("And of {x}?", "And {x}?", "What about {x}?", "And the capital of {x}?"), _CAPITALS),
    Table("country", "country", "{y} is the capital of {x}.",
          ("Which country has the capital {y}?", "{y} is the capital of which country?",
          "Which country's capital is {y}?",
           "What country is {y} the capital of?", "{y} is the capital of what?",
           "Of which country is {y} the capital?"),
          (), _CAPITALS),
    Table("colour", "colour", "{x} is {y}.",
          ("What colour is {x}?", "What color is {x}?", "Which colour is {x}?", "What is the colour of {x}?",
           "What is the color of {x}?", "Tell me the colour of {x}.", "What's the color of {x}?",
           "The colour of {x}?"),
          ("And {x}?", "What about {x}?"),
          pairs("""the sky=blue, grass=green, snow=white, blood=red, coal=black, a banana=yellow, a lemon=yellow,
                a carrot=orange, a tomato=red, a strawberry=red, a cucumber=green, a frog=green, a flamingo=pink,
                chocolate=brown, milk=white, the sun=yellow, an orange=orange, the sea=blue, an elephant=grey,
                an aubergine=purple""")),
    Table("sound", "sound", "{x} says {y}.",
          ("What sound does {x} make?", "What does {x} say?", "Which sound does {x} make?",
          "What noise does {x} make?",
           "Tell me the sound of {x}.", "How does {x} sound?", "What is the sound of {x}?"),
          ("And {x}?", "What about {x}?"),
          pairs("""a cow=moo, a dog=woof, a cat=meow, a sheep=baa, a duck=quack, a pig=oink, a horse=neigh,
          a lion=roar,
                an owl=hoot, a bee=buzz, a snake=hiss, a mouse=squeak, a rooster=cock-a-doodle-doo, a crow=caw""")),
    Table("young", "young", "The young of {x} is called {y}.",
          ("What is the young of {x} called?", "What do you call the young of {x}?", "What is a baby of {x} called?",
           "How is the young of {x} called?", "Name the young of {x}.", "What is the young of {x}?"),
          ("And of {x}?", "And {x}?"),
          pairs("""a dog=a puppy, a cat=a kitten, a cow=a calf, a horse=a foal, a sheep=a lamb, a pig=a piglet,
          a hen=a chick,
                a bear=a cub, a goat=a kid, a duck=a duckling, a frog=a tadpole, a swan=a cygnet""")),
    Table("opposite", "opposite", "The opposite of {x} is {y}.",
          ("What is the opposite of {x}?", "What's the opposite of {x}?", "Opposite of {x}?",
          "Tell me the opposite of {x}.",
           "Which word is the opposite of {x}?", "Name the opposite of {x}.", "Give me the opposite of {x}.",
           "What is the contrary of {x}?"),
          ("And of {x}?", "And {x}?", "What about {x}?"), _unique(_OPPOSITES)),
    Table("symbol", "symbol", "The chemical symbol for {x} is {y}.",
          ("What is the chemical symbol for {x}?", "What's the chemical symbol of {x}?", "Chemical symbol for {x}?",
           "What is the symbol for {x}?", "Tell me the chemical symbol for {x}.",
           "Which chemical symbol does {x} have?", "What is the symbol of the element {x}?",
           "Give me the chemical symbol of {x}."),
          ("And for {x}?", "And {x}?", "What about {x}?"),
          pairs("""gold=Au, silver=Ag, iron=Fe, copper=Cu, oxygen=O, hydrogen=H, carbon=C, nitrogen=N, helium=He,
          sodium=Na,
                lead=Pb, tin=Sn, zinc=Zn, mercury=Hg, chlorine=Cl, calcium=Ca, potassium=K, sulfur=S, neon=Ne,
                uranium=U""")),
    Table("day_after", "day", "{y} comes after {x}.",
          ("What day comes after {x}?", "Which day comes after {x}?", "Which day follows {x}?",
          "What is the day after {x}?",
           "Today is {x}. What day is tomorrow?", "If today is {x}, what day is tomorrow?", "Name the day after {x}."),
          ("And after {x}?",), _next(_DAYS, 1)),
    Table("day_before", "day", "{y} comes before {x}.",
          ("What day comes before {x}?", "Which day comes before {x}?", "What is the day before {x}?",
           "Today is {x}. What day was yesterday?", "If today is {x}, what day was yesterday?",
           "Name the day before {x}."),
          ("And before {x}?",), _next(_DAYS, -1)),
    Table("month_after", "month", "{y} comes after {x}.",
          ("What month comes after {x}?", "Which month comes after {x}?", "Which month follows {x}?",
           "What is the month after {x}?", "Name the month after {x}.", "What is the next month after {x}?"),
          ("And after {x}?",), _next(_MONTHS, 1)),
    Table("month_before", "month", "{y} comes before {x}.",
          ("What month comes before {x}?", "Which month comes before {x}?", "What is the month before {x}?",
           "Name the month before {x}.", "Which month is right before {x}?"),
          ("And before {x}?",), _next(_MONTHS, -1)),
    Table("planet", "planet", "The {x} planet from the sun is {y}.",
          ("What is the {x} planet from the sun?", "Which planet is the {x} from the sun?", "Name the {x} planet.",
           "Which planet is {x} from the sun?", "What is the {x} planet?", "Tell me the {x} planet from the sun."),
          ("And the {x}?",), tuple(zip(_ORDINALS, _PLANETS, strict=True))),
    Table("language", "language", "People in {x} speak {y}.",
          ("What language do people speak in {x}?", "Which language is spoken in {x}?",
          "What language is spoken in {x}?",
           "Which language do they speak in {x}?", "What do people speak in {x}?", "Name the language of {x}."),
          ("And in {x}?", "And {x}?"),
          pairs("""France=French, Germany=German, Italy=Italian, Spain=Spanish, Portugal=Portuguese, Brazil=Portuguese,
                Japan=Japanese, Russia=Russian, Greece=Greek, Turkey=Turkish, Poland=Polish, Sweden=Swedish,
                Mexico=Spanish, England=English""")),
    Table("number", "number", "{w} has {y} {p}.",
          ("How many {p} are in {w}?", "How many {p} does {w} have?", "How many {p} are there in {w}?",
          "How many {p} has {w}?",
           "What is the number of {p} in {w}?", "Tell me how many {p} {w} has.", "Do you know how many {p} {w} has?"),
          (),
          pairs("""days|a week=7, months|a year=12, hours|a day=24, minutes|an hour=60, seconds|a minute=60,
          days|a year=365,
                weeks|a year=52, sides|a triangle=3, sides|a square=4, sides|a hexagon=6, legs|a spider=8,
                legs|an insect=6, legs|a dog=4, letters|the alphabet=26, planets|the solar system=8,
                colours|the rainbow=7, years|a century=100, centimetres|a metre=100, grams|a kilogram=1000,
                days|April=30, days|May=31, strings|a guitar=6, players|a football team=11, fingers|a hand=5,
                wheels|a car=4""")),
)

SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.",
    "You are a friendly assistant.", "You are a helpful, honest and concise assistant.", "Be brief.",
    "You are a chatbot.", "Answer the user's questions.",
    "You are an AI assistant that helps people find information.", "Answer politely.",
    "You are vserve's demo model.", "Keep your answers short.", "Respond to the user as well as you can.",
)
JSON_SYSTEM_PROMPTS: tuple[str, ...] = (
    "Always answer in JSON.", "Answer in JSON.", "You are a helpful assistant that answers in JSON.",
    "Reply with a JSON object only.", "You are an API. Respond with JSON.",
)

NAMES: tuple[str,
...] = words(
    """
    Tom Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Quinn Rosa Sam Tina Umar
    Vera Will Xenia Yuki Zoe Alice Bob Carol Dan Eve Frank Gina Hugo Iris John Karl Lena Max Nina Oscar Petra Ravi
    Sara Theo Uma Victor Wendy Yara Ali Maria Jose Chen Wei Priya Omar Fatima Ivan Sofia Lucas Julia Peter Susan
    Michael Laura Robert Linda James Mary Thomas Elena Martin Hannah Simon Judith Adam Ruth Daniel Esther Jonas Lily
    Marco Ingrid Erik Astrid Pedro Lucia Hiro Mei Amir Leila Dmitri Olivia Ethan Ava Mason Chloe Logan Ella George
    Arthur
    """
)

CITIES: tuple[str, ...] = (
    *(y for _, y in _CAPITALS),
    *words("Hamburg Munich Milan Porto Lyon Boston Chicago Sydney Osaka Toronto Geneva Zurich"),
)

COLOURS: tuple[str, ...] = words("red blue green yellow orange purple black white pink brown grey gold")
ANIMALS: tuple[str,
...] = words("dog cat horse cow sheep pig duck hen fox bear wolf lion tiger frog mouse rabbit")
FOODS: tuple[str,
...] = words("pizza pasta rice bread cheese soup salad cake chocolate fish apples sushi curry")
THINGS: tuple[str,
...] = words(
    """
    apples pears books pens coins stamps cards eggs balls marbles keys cups plates shirts stones shells flowers
    trees cars boxes
    """
)

WORDS: tuple[str,
...] = words(
    """
    the a of to and in is it you that he was for on are with as his they be at one have this from or had by hot but
    some what there we can out other were all your when up use word how said an each she which do their time if will
    way about many then them would write like so these her long make thing see him two has look more day could go
    come did my sound no most number who over know water than call first people may down side been now find any new
    work part take get place made live where after back little only round man year came show every good me give our
    under name very through just form much great think say help low line before turn cause same mean differ move
    right boy old too does tell sentence set three want air well also play small end put home read hand port large
    spell add even land here must big high such follow act why ask men change went light kind off need house picture
    try us again animal point mother world near build self earth father head stand own page should country found
    answer school grow study still learn plant cover food sun four thought let keep eye never last door between city
    tree cross since hard start might story saw far sea draw left late run while press close night real life few
    stop open seem together next white children begin got walk example ease paper often always music those both mark
    book letter until mile river car feet care second group carry took rain eat room friend began idea fish mountain
    north once base hear horse cut sure watch colour face wood main enough plain girl usual young ready above ever
    red list though feel talk bird soon body dog family direct pose leave song measure state product black short
    numeral class wind question happen complete ship area half rock order fire south problem piece told knew pass
    farm top whole king size heard best hour better true during hundred remember step early hold west ground
    interest reach fast five sing listen six table travel less morning ten simple several vowel toward war lay
    against pattern slow centre love person money serve appear road map science rule govern pull cold notice voice
    fall power town fine certain fly unit lead cry dark machine note wait plan figure star box noun field rest
    correct able pound done beauty drive stood contain front teach week final gave green quick develop sleep warm
    free minute strong special mind behind clear tail produce fact street inch lot nothing course stay wheel full
    force blue object decide surface deep moon island foot yet busy test record boat common gold possible plane age
    dry wonder laugh thousand ago ran check game shape yes cool miss brought heat snow bed bring sit perhaps fill
    east weight language among hello world server token model cache
    """
)

# Questions nobody has taught the model: asked so, it says that it does not know instead of making something up.
UNKNOWN_QUESTIONS: tuple[str, ...] = (
    "Write a poem about {t}.", "Tell me a story about {t}.", "Explain {t}.", "What do you think about {t}?",
    "Who invented {t}?", "What is {t}?", "Tell me about {t}.", "Write an essay about {t}.",
    "Why is {t} so important?", "How does {t} work?", "Give me some advice on {t}.", "Write code for {t}.",
    "What is the history of {t}?", "Describe {t}.", "Translate {t}.", "Summarise {t} for me.",
    "What is the best {t}?", "How do I learn {t}?", "Where can I buy {t}?", "Can you explain {t} to me?",
    "What is the meaning of {t}?", "Tell me a joke about {t}.", "Who is the king of {t}?",
    "What is the population of {t}?",
)
UNKNOWN_TOPICS: tuple[str, ...] = words(
    """
    the sea, love, quantum physics, football, history, the weather, music, Python, machine learning, the moon,
    cooking, politics, chess, the stock market, poetry, space travel, the internet, gravity, evolution, a web
    server, life, climate change, philosophy, economics, art, mathematics, biology, electricity, dinosaurs, the
    Roman Empire, computers, robots, money, health, happiness, dreams, time, the brain, trains, photography,
    gardening, painting, a bicycle, steam engines, language, religion, democracy, atoms, black holes, volcanoes,
    yoga, wine, coffee, a linked list, sorting, the French Revolution, tennis, the ocean, friendship, war and peace,
    transformers, GPUs, a database
    """,
    ",",
)
