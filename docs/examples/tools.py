"""The model calls a function of this program, and answers with what it returns."""

import json

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id


def get_weather(city: str) -> str:
    return f"In {city} it is 21 degrees and sunny."


tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
answer = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice="required", temperature=0, max_tokens=100
)
message = answer.choices[0].message
messages.append(message)
for call in message.tool_calls or ():
    arguments = json.loads(call.function.arguments)
    print(f"{call.function.name}({arguments})")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather(**arguments)})
answer = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0, max_tokens=100)
print(answer.choices[0].message.content)
