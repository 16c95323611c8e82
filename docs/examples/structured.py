"""An answer that fits a JSON schema, whatever the model would have said."""

import json

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Describe a person as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    temperature=0,
    max_tokens=200,
)
print(json.loads(answer.choices[0].message.content))
