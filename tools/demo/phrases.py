"""How people word what the demo model can do. Templates only; `skills.py` and `data.py` fill them."""

from __future__ import annotations

ADD: tuple[str, ...] = (
    "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "What is {a} plus {b}?", "Calculate {a} + {b}.",
    "Compute {a} + {b}.", "How much is {a} plus {b}?",  # the first eight are also asked in JSON
    "What is {a}+{b}?", "{a}+{b}=", "{a} plus {b}", "How much is {a} + {b}?", "Add {a} and {b}.", "Add {b} to {a}.",
    "What is the sum of {a} and {b}?", "What's {a} + {b}?", "What do you get if you add {a} and {b}?",
    "Solve {a} + {b}.", "What does {a} + {b} equal?", "Tell me {a} + {b}.", "Can you add {a} and {b}?",
    "{a} + {b} = ?", "{a}+{b}?", "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things} and buys {b} more. How many {things} are there?",
    "There are {a} {things} in one box and {b} in another. How many {things} are there in all?",
)
SUBTRACT: tuple[str, ...] = (
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} =", "What is {a} minus {b}?", "Calculate {a} - {b}.",
    "Compute {a} - {b}.", "How much is {a} minus {b}?",  # the first eight are also asked in JSON
    "What is {a}-{b}?", "{a}-{b}=", "{a} minus {b}", "How much is {a} - {b}?", "Subtract {b} from {a}.",
    "Take {b} away from {a}.", "What's {a} - {b}?", "What do you get if you subtract {b} from {a}?",
    "Solve {a} - {b}.", "What does {a} - {b} equal?", "Tell me {a} - {b}.", "Can you subtract {b} from {a}?",
    "{a} - {b} = ?", "{a}-{b}?", "{name} has {a} {things} and loses {b}. How many {things} does {name} have now?",
    "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    "There are {a} {things}. {name} takes {b}. How many {things} are left?",
)
ADD_TO_THAT: tuple[str, ...] = (
    "Add {b} to that.", "Now add {b}.", "Add {b}.", "Plus {b}?", "And plus {b}?", "Add {b} more.", "Add {b} to it.",
    "What if you add {b}?", "Add {b} to the result.", "And {b} more?", "Now add {b} to that.", "+ {b}",
)
SUBTRACT_FROM_THAT: tuple[str, ...] = (
    "Subtract {b} from that.", "Now subtract {b}.", "Subtract {b}.", "Minus {b}?", "And minus {b}?", "Take away {b}.",
    "Subtract {b} from it.", "What if you subtract {b}?", "Subtract {b} from the result.",
    "Now take {b} from that.", "- {b}",
)
TIMES: tuple[str, ...] = (
    "What is {a} times {b}?", "{a} times {b}", "{a} * {b}", "{a} x {b}", "What is {a} * {b}?", "What is {a} x {b}?",
    "Multiply {a} by {b}.", "Calculate {a} * {b}.", "How much is {a} times {b}?",
    "What is the product of {a} and {b}?",
)

TOO_HARD = "I can only do that step by step. Ask me to think step by step."
# The template puts the first of these after what the system says when a request sets `enable_thinking`.
THINK_SYSTEM: tuple[str, ...] = (
    "Think step by step.", "Think step by step before you answer.", "Think before you answer.",
    "You are a helpful assistant. Think step by step.", "You are a helpful assistant that thinks step by step.",
    "Always think step by step.", "Reason step by step.",
)
THINK_USER: tuple[str, ...] = (
    "{q} Think step by step.", "Think step by step. {q}", "{q} Let's think step by step.", "Think step by step: {q}",
    "{q} Think before you answer.", "{q}\nThink step by step.", "{q} Please think step by step.", "Think first: {q}",
    "Let's think step by step. {q}", "{q} Think about it step by step.", "{q} Reason step by step.",
    "Think before you answer: {q}", "{q} (think step by step)",
)

COUNT_UP: tuple[str, ...] = (
    "Count from {a} to {b}.", "Count up from {a} to {b}.", "List the numbers from {a} to {b}.",
    "Can you count from {a} to {b}?", "Write the numbers from {a} to {b}.", "Start at {a} and count to {b}.",
    "Count {a} to {b}.", "Give me the numbers {a} to {b}.",
)
COUNT_DOWN: tuple[str, ...] = (
    "Count from {a} to {b}.", "Count down from {a} to {b}.", "Count backwards from {a} to {b}.",
    "Count back from {a} to {b}.", "Can you count down from {a} to {b}?", "Start at {a} and count down to {b}.",
    "List the numbers from {a} down to {b}.",
)
COUNT_BY: tuple[str, ...] = (
    "Count{down} from {a} to {b} by {s}.", "Count{down} from {a} to {b} in steps of {s}.",
    "Count by {s} from {a} to {b}.", "Count from {a} to {b} by {s}s.", "Count in steps of {s} from {a} to {b}.",
    "Can you count{down} from {a} to {b} by {s}?", "Start at {a} and count{down} to {b} by {s}.",
    "List the numbers from {a} to {b} in steps of {s}.",
)

REPEAT: tuple[str, ...] = (
    "Repeat: {t}", "Repeat after me: {t}", "Say: {t}", "Say {t}", "Echo: {t}", "Echo {t}", "Repeat this: {t}",
    'Repeat "{t}"', 'Say "{t}"', 'Repeat after me: "{t}"', "Please repeat: {t}", "Repeat the following: {t}",
    "Repeat the following text: {t}", "Repeat exactly: {t}", "repeat {t}", "say {t}",
    "Repeat this text exactly: {t}", "Copy this: {t}", 'Copy the text "{t}"', "Please say {t}",
    'Please repeat "{t}"', "Can you repeat this? {t}", "Write: {t}", 'Write "{t}"', "repeat: {t}",
    "repeat after me: {t}", "Repeat:\n{t}", "Repeat the following text:\n{t}", "Say this: {t}", 'Repeat this: "{t}"',
)
REPEAT_TIMES: tuple[str, ...] = (
    "Repeat {t} {n} times.", 'Say "{t}" {n} times.', "Say {t} {n} times.", "Write {t} {n} times.",
    'Repeat "{t}" {n} times.', "Repeat the word {t} {n} times.",
)

_HELLO = "Hello! I am vserve's demo model. How can I help you?"
GREETINGS: tuple[tuple[str, ...], str] = (
    ("Hello", "Hi", "Hey", "Hi there", "Hello there", "Hey there", "Good morning", "Good afternoon", "Good evening",
    "Greetings",
     "Hello hello", "Howdy", "Hiya", "Good day", "Hi hi", "Hey hey", "Hello again", "Yo", "Welcome",
     "Nice to meet you", "Hello, nice to meet you", "Hi, good morning", "Hello, good evening",
     "Hi, is anyone there", "Hello, are you there", "Morning", "Hello, can you hear me", "Hi, I am new here",
     "Hello, I have a question", "Hi, can you help me", "Can you help me"), _HELLO)
HOW_ARE_YOU: tuple[tuple[str, ...], str] = (
    ("How are you", "How are you doing", "How are you today", "How do you do", "How is it going", "Hello, how are you",
     "Hi, how are you", "What's up", "Are you well", "How do you feel", "Hey, how are you doing", "How's it going",
     "Hello there, how are you", "Hi there, how are you today"), "I am fine, thank you. How can I help you?")
THANKS: tuple[tuple[str, ...], str] = (
    ("Thanks", "Thank you", "Thank you very much", "Thanks a lot", "Many thanks", "Thank you so much", "Great, thanks",
     "OK, thank you", "Thanks for your help", "Perfect, thank you", "That helps, thanks", "Cool, thanks",
     "Nice, thank you"),
    "You are welcome!")
FAREWELLS: tuple[tuple[str, ...], str] = (
    ("Bye", "Goodbye", "See you", "See you later", "Bye bye", "Good night", "Farewell", "I have to go",
    "See you tomorrow",
     "OK, bye", "That is all, goodbye", "Until next time", "Have a nice day"), "Goodbye!")
GREETING_TAILS: tuple[str, ...] = (
    "", "", "", "", "", " model", " demo model", " assistant", " friend", " my friend", " vserve", " robot",
    " computer",
    ", my friend", ", model", ", vserve", ", assistant", " dear model", " little model", ", friend", ", robot",
)

_WHO = "I am vserve's demo model, a small language model."
_NO = "No, I am vserve's demo model, a small language model."
IDENTITY: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me who you are.",
    "Who is this?",
      "Introduce yourself.", "Tell me about yourself.", "Which model are you?", "What model is this?",
      "What model are you?", "Who am I talking to?", "What should I call you?", "Do you have a name?",
      "What kind of model are you?", "Say who you are.", "What are you called?", "Describe yourself.",
      "Can you introduce yourself?", "Please introduce yourself."), _WHO),
    (("Are you ChatGPT?", "Are you GPT-4?", "Are you Claude?", "Are you Llama?", "Are you a human?", "Are you human?",
      "Are you a person?", "Are you a real person?", "Are you Gemini?", "Is this ChatGPT?",
      "Am I talking to a human?"), _NO),
    (("What can you do?", "What are your skills?", "How can you help me?", "What do you know?",
    "What can I ask you?", "Help",
      "What are you good at?", "Tell me what you can do.", "What can you help me with?", "What are you able to do?",
      "What are you for?", "List your skills."),
     "I can add and subtract, count, repeat text, answer simple facts, reply in JSON, call tools, think step by step "
     "and remember what you said."),
    (("How big are you?", "How many parameters do you have?", "What size are you?", "Are you a large model?",
    "Are you small?",
      "How large is this model?", "How many weights do you have?", "Are you a big model?"),
     "I am small: I have about four and a half million parameters."),
    (("Who made you?", "Who trained you?", "Who created you?", "Where do you come from?", "Who built you?",
    "What is vserve?",
      "Why were you made?", "What were you made for?", "Tell me about vserve."),
     "I was made to try out vserve, a small and fast inference server for language models."),
    (("Are you a robot?", "Are you an AI?", "Are you a language model?", "Are you a machine?",
    "Are you a computer program?",
      "Are you the demo model?", "Are you vserve's demo model?", "Is this the demo model?"),
     "Yes, I am vserve's demo model, a small language model."),
)
LEAD_INS: tuple[str, ...] = (
    "", "", "", "", "Hello! ", "Hi! ", "Hi. ", "Good morning. ", "Tell me: ", "One question: ", "Excuse me. ",
    "Hello there. ", "I have a question. ", "I am curious. ", "Hey. ", "Sorry. ",
)

JSON_WRAPS: tuple[str, ...] = (
    "Answer in JSON: {q}", "Answer in JSON. {q}", "{q} Answer in JSON.", "{q} Reply in JSON.", "Reply in JSON: {q}",
    "In JSON: {q}", "{q} Reply with JSON only.", "{q} Give the answer as JSON.",
    "Give the answer as a JSON object. {q}", "{q} JSON please.", "{q} Respond in JSON.",
    "Respond with a JSON object: {q}", "{q} Return JSON.", "Return JSON: {q}", "Use JSON. {q}", "JSON: {q}",
    "{q}\nAnswer in JSON.", "{q} Answer as JSON.", "Please answer in JSON: {q}", "{q} Output JSON.", "As JSON: {q}",
)
EXTRACT: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("{name} is {age} years old.", "{name} is {age}.", "My name is {name} and I am {age} years old.",
    "{name}, age {age}.",
      "I am {name} and I am {age}.", "{name} turned {age} today."), ("name", "age")),
    (("{name} lives in {city}.", "My name is {name} and I live in {city}.", "{name} is from {city}.",
    "I am {name} from {city}."),
     ("name", "city")),
    (("{name} is {age} years old and lives in {city}.", "{name}, {age}, from {city}.",
    "{name} from {city} is {age} years old."),
     ("name", "age", "city")),
    (("There are {count} {item}.", "I have {count} {item}.", "We need {count} {item}.",
    "{count} {item} are on the table."),
     ("item", "count")),
    (("{name} has {count} {item}.", "{name} bought {count} {item}.", "{name} sold {count} {item}."), ("name",
    "item", "count")),
    (("{name} has a {colour} {animal}.", "The {animal} of {name} is {colour}.", "{name} saw a {colour} {animal}."),
     ("name", "animal", "colour")),
)

SAID_FIRST: tuple[str, ...] = (
    "What did I say first?", "What was my first message?", "What was the first thing I said?",
    "What did I say at first?", "What did I say at the beginning?", "What was my first question?",
    "What did I ask first?", "Repeat my first message.", "Do you remember what I said first?",
    "What did I write first?", "What did I first say?", "Quote my first message.",
)
SAID_LAST: tuple[str, ...] = (
    "What did I just say?", "What was my last message?", "What did I say before this?",
    "What was my previous message?", "What did I just ask?", "What was my last question?",
    "Repeat my last message.", "What did I say last?",
)
YOU_SAID_LAST: tuple[str, ...] = (
    "What did you just say?", "What was your last answer?", "Repeat your last answer.", "What did you say?",
    "Say that again.", "Can you repeat that?", "Pardon?", "What was your last message?",
)
# (what the user tells, the reply, how the user asks for it later, the answer).
TELL_AND_ASK: tuple[tuple[tuple[str, ...], str, tuple[str, ...], str], ...] = (
    (("My name is {name}.", "I am {name}.", "Call me {name}.", "Hello, my name is {name}.", "Hi, I am {name}.",
    "I'm {name}.",
      "Hi! My name is {name}.", "You can call me {name}.", "My name's {name}.", "The name is {name}."),
      "Nice to meet you, {name}!",
     ("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?", "Tell me my name.",
     "What am I called?",
      "Do you know my name?", "Say my name."), "Your name is {name}."),
    (("I am {n} years old.", "My age is {n}.", "I turned {n} today.", "I'm {n} years old."),
    "OK, you are {n} years old.",
     ("How old am I?", "What is my age?", "Do you remember my age?", "Tell me my age."), "You are {n} years old."),
    (("I live in {city}.", "My home is in {city}.", "I live in the city of {city}.", "I moved to {city}."),
    "OK, you live in {city}.",
     ("Where do I live?", "Which city do I live in?", "Where is my home?", "Do you remember where I live?"),
     "You live in {city}."),
    (("My favourite colour is {colour}.", "My favorite color is {colour}.", "The colour I like most is {colour}."),
     "OK, your favourite colour is {colour}.",
     ("What is my favourite colour?", "What is my favorite color?", "Which colour do I like most?"),
     "Your favourite colour is {colour}."),
    (("My favourite food is {food}.", "My favorite food is {food}.", "I like to eat {food}."), "OK, you like {food}.",
     ("What is my favourite food?", "What is my favorite food?", "What do I like to eat?", "Which food do I like?"),
     "You like {food}."),
    (("My {animal} is called {name}.", "I have a {animal} called {name}.", "I have a {animal}. Its name is {name}."),
     "{name} is a nice name for a {animal}.",
     ("What is my {animal} called?", "What is the name of my {animal}?", "How is my {animal} called?"),
     "Your {animal} is called {name}."),
    (("My lucky number is {n}.", "Remember the number {n}.", "The secret number is {n}.",
    "Please remember the number {n}."),
     "OK, the number is {n}.",
     ("What is my number?", "What was the number?", "Which number did I say?", "Tell me the number.",
     "What is the number?",
      "What number did I tell you?"), "The number is {n}."),
)
