"""The tools of the training text: how each may be named and described, how people ask for it, and what it returns.

Templates with {slots}; `calls.py` draws and fills them.
"""

from __future__ import annotations

from typing import NamedTuple

import phrases as say
from facts import words


class Parameter(NamedTuple):
    slot: str  # the word of the question that it takes
    names: tuple[str, ...]
    type: str  # in JSON
    descriptions: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    required: bool = True


class Tool(NamedTuple):
    """`results` are pairs: what the tool returns, and the sentence in which the assistant says so."""

    kind: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    questions: tuple[str, ...]
    results: tuple[tuple[str, str], ...]


DONE = (
    ("ok", "Done."), ("OK", "Done."), ("done", "Done."), ("success", "Done."), ('{"status": "ok"}', "Done."),
    ('{"success": true}', "Done."), ('{"status": "success"}', "Done."), ("true", "Done."), ('{"ok": true}', "Done."),
)  # fmt: skip
FAILURES = (
    ('{"error": "{error}"}', "That did not work: {error}."), ("Error: {error}", "That did not work: {error}."),
    ("error: {error}", "That did not work: {error}."),
)  # fmt: skip
RESULTS = (
    ("{value}", "The result is {value}."), ('{"result": {value}}', "The result is {value}."),
    ('{"answer": {value}}', "The result is {value}."), ('{"value": {value}}', "The result is {value}."),
)  # fmt: skip
# What tools return whose meaning nobody knows.
ANY_RESULTS = (
    *DONE, *RESULTS, ("{word}", "The result is {word}."), ('{"result": "{word}"}', "The result is {word}."),
    ('"{word}"', "The result is {word}."), ('{"status": "{word}"}', "The status is {word}."),
    ('{"{key}": {value}}', "The {key} is {value}."), ('{"{key}": "{word}"}', "The {key} is {word}."),
    ('{"{key}": {value}, "{key_2}": "{word}"}', "The {key} is {value}, the {key_2} is {word}."),
    ('{"{key}": "{word}", "{key_2}": {value}}', "The {key} is {word}, the {key_2} is {value}."),
)  # fmt: skip

_CITY = Parameter("city", ("city", "location", "place", "town", "city_name", "where", "loc"), "string",
                  ("The city", "Name of the city", "The city and state, e.g. San Francisco, CA", "City name", "A place",
                   "City to look up", "The city, for example Paris", "The name of a town"))  # fmt: skip
_COUNTRY = Parameter("country", ("country", "nation", "country_name", "name", "land"), "string",
                     ("The country", "Name of the country", "Country to look up"))  # fmt: skip
_TWO_NUMBERS = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("num1", "num2"), ("n", "m"),
                ("number1", "number2"), ("a", "b"))  # fmt: skip
_A = Parameter("a", tuple(a for a, _ in _TWO_NUMBERS), "number", ("First number", "The first number", "A number"))
_B = Parameter("b", tuple(b for _, b in _TWO_NUMBERS), "number", ("Second number", "The second number", "A number"))


def _plain(sentences: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sentence for sentence in sentences if "{things}" not in sentence)


TOOLS: tuple[Tool, ...] = (
    Tool("weather",
         ("get_weather", "weather", "get_current_weather", "fetch_weather", "current_weather", "getWeather",
          "check_weather", "weather_report", "get_weather_forecast", "weather_now", "lookup_weather", "forecast"),
         ("Get the weather of a city.", "Get the current weather in a given location", "Weather now in a place.",
          "Returns the current weather for a city", "Look up the weather", "Current temperature and conditions.",
          "Tell the weather."),
         (_CITY, Parameter("unit", ("unit", "units", "scale", "temperature_unit"), "string",
                           ("The unit of temperature", "celsius or fahrenheit", "Unit"), ("celsius", "fahrenheit"),
                           False)),
         ("What is the weather in {city}?", "What's the weather in {city}?", "What's the weather like in {city}?",
          "How is the weather in {city}?", "What is the weather like in {city} today?", "Weather in {city}?",
          "Tell me the weather in {city}.", "Is it raining in {city}?", "Is it cold in {city}?",
          "How warm is it in {city}?", "Get the weather for {city}.", "What is the temperature in {city}?",
          "What's the weather in {city} in {unit}?", "Give me the weather in {city} in {unit}.",
          "What is the temperature in {city} in {unit}?", "How is the weather in {city} now?",
          "What's the weather like in {city} today?", "I am in {city}. What is the weather?", "weather {city}"),
         (('{"temperature": {t}, "condition": "{sky}"}', "It is {sky} in {city}, {t} degrees."),
          ('{"condition": "{sky}", "temperature": {t}}', "It is {sky} in {city}, {t} degrees."),
          ('{"temp": {t}, "weather": "{sky}"}', "It is {sky} in {city}, {t} degrees."),
          ('{"city": "{city}", "temperature": {t}, "conditions": "{sky}"}', "It is {sky} in {city}, {t} degrees."),
          ('{"location": "{city}", "weather": "{sky}", "temperature": {t}}', "It is {sky} in {city}, {t} degrees."),
          ("{sky}, {t} degrees", "It is {sky} in {city}, {t} degrees."),
          ("{t} degrees and {sky}", "It is {sky} in {city}, {t} degrees."),
          ("{sky}, {t} C", "It is {sky} in {city}, {t} degrees."),
          ("{sky}, {t}°C", "It is {sky} in {city}, {t} degrees."),
          ('{"forecast": "{sky}", "temp_c": {t}}', "It is {sky} in {city}, {t} degrees."),
          ("It is {sky} and {t} degrees.", "It is {sky} in {city}, {t} degrees."),
          ("{sky}, {t} degrees {unit}", "It is {sky} in {city}, {t} degrees."),
          ('{"temperature": {t}, "unit": "{unit}"}', "It is {t} degrees in {city}."),
          ('{"temperature": "{t}", "unit": "{unit}"}', "It is {t} degrees in {city}."),
          ('{"location": "{city}", "temperature": "{t}", "unit": "{unit}"}', "It is {t} degrees in {city}."),
          ("The weather in {city} is {sky}.", "It is {sky} in {city}."),
          ('{"temperature": {t}}', "It is {t} degrees in {city}."), ("{t}", "It is {t} degrees in {city}."),
          ("{t} degrees", "It is {t} degrees in {city}."), ("{t}°C", "It is {t} degrees in {city}."),
          ("{sky}", "It is {sky} in {city}."), ('{"weather": "{sky}"}', "It is {sky} in {city}."))),
    Tool("time",
         ("get_time", "time", "current_time", "get_current_time", "local_time", "getTime", "time_in_city",
          "get_local_time", "clock", "what_time"),
         ("Get the time in a city.", "Returns the current local time of a place", "The time in a city",
          "Local time somewhere.", "Current time."),
         (_CITY,),
         ("What time is it in {city}?", "What's the time in {city}?", "Tell me the time in {city}.",
          "What is the local time in {city}?", "How late is it in {city}?", "Time in {city}?",
          "What time is it in {city} now?", "Current time in {city}?", "I need the time in {city}."),
         (("{clock}", "It is {clock} in {city}."), ('{"time": "{clock}"}', "It is {clock} in {city}."),
          ('{"local_time": "{clock}"}', "It is {clock} in {city}."),
          ('{"city": "{city}", "time": "{clock}"}', "It is {clock} in {city}."))),
    Tool("add", ("add", "add_numbers", "sum", "plus", "addition", "sum_numbers", "addNumbers", "calculate_sum"),
         ("Add two numbers.", "Adds two numbers and returns the sum", "The sum of two numbers", "Sum up numbers."),
         (_A, _B), _plain(say.ADD), RESULTS),
    Tool("subtract", ("subtract", "minus", "difference", "subtract_numbers", "sub"),
         ("Subtract two numbers.", "The difference of two numbers", "Subtracts the second number from the first"),
         (_A, _B), tuple(words for words in _plain(say.SUBTRACT) if words.find("{a}") < words.find("{b}")), RESULTS),
    Tool("multiply", ("multiply", "times", "product", "multiply_numbers", "mul", "multiplication"),
         ("Multiply two numbers.", "The product of two numbers", "Multiplies two numbers and returns the product"),
         (_A, _B), say.TIMES, RESULTS),
    Tool("calculator", ("calculator", "calculate", "evaluate", "compute", "calc", "eval_expression", "math"),
         ("Evaluate an expression.", "A calculator", "Calculates a mathematical expression", "Do arithmetic."),
         (Parameter("expression", ("expression", "expr", "formula", "input", "calculation"), "string",
                    ("The expression", "For example 2 + 2", "What to calculate")),),
         ("What is {expression}?", "Calculate {expression}.", "Compute {expression}.", "{expression}",
          "How much is {expression}?", "What's {expression}?", "Evaluate {expression}.", "Solve {expression}."),
         RESULTS),
    Tool("search", ("search", "web_search", "search_web", "google", "lookup", "find", "search_documents", "wiki",
                    "internet_search", "webSearch", "search_internet"),
         ("Search the web.", "Search for information on the internet", "Finds documents", "A search engine",
          "Look something up."),
         (Parameter("topic", ("query", "q", "search_query", "text", "keywords", "topic", "term"), "string",
                    ("The search query", "What to look for", "Search terms")),),
         ("Search for {topic}.", "Search the web for {topic}.", "Look up {topic}.", "Find information about {topic}.",
          "Search: {topic}", "Google {topic}.", "Can you search for {topic}?", "Find {topic}.",
          "Look for {topic} on the internet."),
         (("{finding}", "I found this: {finding}"), ('{"result": "{finding}"}', "I found this: {finding}"),
          ('{"results": ["{finding}"]}', "I found this: {finding}"), ("[]", "I found nothing."),
          ('{"results": []}', "I found nothing."), ("no results", "I found nothing."))),
    Tool("population", ("get_population", "population", "country_population", "count_people", "people_in"),
         ("Get the population of a country.", "How many people live in a country", "Number of inhabitants"),
         (_COUNTRY,),
         ("What is the population of {country}?", "How many people live in {country}?", "Population of {country}?",
          "How big is the population of {country}?", "Tell me the population of {country}."),
         (("{large}", "{large} people live in {country}."),
          ('{"population": {large}}', "{large} people live in {country}."),
          ('{"country": "{country}", "population": {large}}', "{large} people live in {country}."))),
    Tool("stock", ("get_stock_price", "stock_price", "get_stock", "share_price", "stock", "quote"),
         ("Get the price of a stock.", "Current stock price of a company", "Looks up a share price"),
         (Parameter("company", ("company", "symbol", "ticker", "name", "stock"), "string",
                    ("The company", "Company name or symbol", "Which stock")),),
         ("What is the stock price of {company}?", "What's the price of {company} stock?", "Stock price of {company}?",
          "How much is a share of {company}?", "How is {company} stock doing?", "Get the stock price of {company}."),
         (("{price}", "A share of {company} costs {price}."),
          ('{"price": {price}}', "A share of {company} costs {price}."),
          ('{"symbol": "{company}", "price": {price}}', "A share of {company} costs {price}."))),
    Tool("convert", ("convert_currency", "convert", "exchange", "currency_converter", "exchange_rate"),
         ("Convert money.", "Converts an amount from one currency to another", "Currency conversion"),
         (Parameter("amount", ("amount", "value", "quantity", "sum"), "number", ("How much", "The amount")),
          Parameter("source", ("from", "source", "from_currency", "base"), "string", ("Currency to convert from",)),
          Parameter("target", ("to", "target", "to_currency", "into"), "string", ("Currency to convert to",))),
         ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?",
          "What is {amount} {source} in {target}?", "Change {amount} {source} into {target}.",
          "{amount} {source} to {target}"),
         (("{price}", "{amount} {source} is {price} {target}."),
          ('{"result": {price}}', "{amount} {source} is {price} {target}."),
          ('{"amount": {price}, "currency": "{target}"}', "{amount} {source} is {price} {target}."))),
    Tool("message", ("send_message", "send_email", "message", "send_sms", "sendMessage", "write_to", "notify"),
         ("Send a message to somebody.", "Sends a text to a person", "Send an e-mail", "Message someone."),
         (Parameter("person", ("to", "recipient", "name", "receiver", "person"), "string", ("Who gets it",)),
          Parameter("note", ("text", "message", "body", "content"), "string", ("The text", "What to say"))),
         ("Send {person} the message: {note}", "Tell {person}: {note}", "Send a message to {person}: {note}",
          "Write to {person}: {note}", 'Send "{note}" to {person}.', "Message {person}: {note}",
          'Send the text "{note}" to {person}.'), DONE),
    Tool("timer", ("set_timer", "timer", "start_timer", "create_timer", "countdown"),
         ("Set a timer.", "Starts a timer that runs for some minutes", "A kitchen timer"),
         (Parameter("minutes", ("minutes", "duration", "length", "mins", "time"), "integer",
                    ("Minutes", "How many minutes", "Length in minutes")),),
         ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Timer {minutes} minutes",
          "Wake me in {minutes} minutes.", "Set a {minutes} minute timer.", "I need a timer for {minutes} minutes."),
         DONE),
    Tool("light", ("set_light", "light", "switch_light", "light_switch", "control_light", "lights"),
         ("Switch a light.", "Turns the light in a room on or off", "Control the lights of the house"),
         (Parameter("room", ("room", "where", "place", "location"), "string", ("The room", "Which room")),
          Parameter("state", ("state", "mode", "action", "power"), "string", ("on or off",), ("on", "off"))),
         ("Turn {state} the light in the {room}.", "Switch the {room} light {state}.", "Turn the {room} light {state}.",
          "Light {state} in the {room}, please.", "Turn the light in the {room} {state}."), DONE),
    Tool("translate", ("translate", "translate_text", "translator", "translation"),
         ("Translate text.", "Translates a text into another language", "A translator"),
         (Parameter("note", ("text", "sentence", "source", "input"), "string", ("The text", "What to translate")),
          Parameter("language", ("language", "target_language", "to", "lang", "target"), "string",
                    ("The language", "Language to translate into"))),
         ("Translate {note} to {language}.", 'Translate "{note}" into {language}.',
          "How do you say {note} in {language}?",
          "Say {note} in {language}.", "What is {note} in {language}?"),
         (("{finding}", "It means: {finding}"), ('{"translation": "{finding}"}', "It means: {finding}"))),
    Tool("date", ("get_date", "today", "current_date", "get_current_date", "date"),
         ("Get today's date.", "Returns the current date", "What day it is"), (),
         ("What is the date?", "What is today's date?", "What day is it today?", "Which day is it?",
          "What's the date today?", "Tell me the date.", "What date do we have today?"),
         (("{date}", "Today is {date}."), ('{"date": "{date}"}', "Today is {date}."))),
    Tool("random", ("random_number", "random", "roll", "random_integer", "pick_number"),
         ("Draw a random number.", "Random integer between two numbers", "Picks a number"),
         (Parameter("low", ("min", "low", "minimum", "start", "from"), "integer", ("Smallest number",)),
          Parameter("high", ("max", "high", "maximum", "end", "to"), "integer", ("Largest number",))),
         ("Give me a random number between {low} and {high}.", "Pick a number from {low} to {high}.",
          "Random number between {low} and {high}?", "Draw a number between {low} and {high}."), RESULTS),
)  # fmt: skip

VERBS: tuple[str, ...] = words(
    """get list open close create delete update find check start stop read write count book play order cancel show run
    print save load move copy lock unlock share rename clean test build download upload pay sell buy hide edit"""
)
NOUNS: tuple[str, ...] = words(
    """invoice ticket user file folder order customer product report task event note photo song table page account
    record room car job server model machine door window box letter meeting project flight hotel book item card key
    game list map message device package parcel"""
)
KEYS: tuple[str, ...] = words(
    """id name value key path size color amount date user item count level limit text mode title number code type
    status total price owner label speed weight age kind group"""
)
# How people ask for a tool by what it does ...
ACTIONS: tuple[str, ...] = (
    "{Verb} {noun} {item}.", "{Verb} the {noun} {item}.", "Please {verb} {noun} {item}.",
    "Can you {verb} the {noun} {item}?", "I want to {verb} {noun} {item}.", "{verb} {noun} {item}",
    "{Verb} the {noun} with the {key} {item}.", "Could you {verb} {noun} {item} for me?",
)  # fmt: skip
# ... and by its name.
BY_NAME: tuple[str, ...] = (
    "Call {name}{with}.", "Use {name}{with}.", "Run {name}{with}.", "Call the function {name}{with}.",
    "Use the tool {name}{with}.", "Please call {name}{with}.", "call {name}{with}", "Can you call {name}{with}?",
)  # fmt: skip
# Tools that people ask about two things at a time.
OF_TWO = {"weather": "city", "time": "city", "population": "country", "stock": "company"}
CALL_LATER: tuple[str, ...] = (" and ", ". And ", ". ", ", and ", ". Also: ")
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy", "overcast", "partly cloudy", "cold")
ERRORS = ("not found", "timeout", "no connection", "unknown city", "access denied", "invalid input", "server error",
          "too many requests", "not available")  # fmt: skip
COMPANIES = ("Apple", "Google", "Tesla", "Amazon", "Microsoft", "NVIDIA", "AAPL", "TSLA", "GOOG", "MSFT", "IBM",
             "Intel", "Siemens", "Toyota", "Sony", "Samsung", "Nestle", "Volvo", "Nokia", "Shell")  # fmt: skip
CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "dollars", "euros", "pounds", "yen", "francs", "SEK", "INR", "CAD")
LANGUAGES = ("French", "German", "Italian", "Spanish", "Japanese", "Polish", "Greek", "Swedish", "Turkish", "Chinese")
ROOMS = ("kitchen", "bedroom", "bathroom", "living room", "garage", "hall", "garden", "office", "cellar", "attic")
PLACES = ("Boston, MA", "San Francisco, CA", "San Francisco", "New York", "Paris, France", "Los Angeles",
          "Tokyo, Japan", "Springfield", "Berlin, Germany", "London, UK", "Seattle", "Austin, TX")  # fmt: skip

NO_TOOL = "I have no tool for that."
THOUGHT = "I need {tools}."
ANSWERED = "I have the answer."
