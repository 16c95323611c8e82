"""A chat of two turns: what was said is sent again with each question."""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id

messages = []
for question in ("My name is Ada.", "What is my name?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    said = answer.choices[0].message.content
    messages.append({"role": "assistant", "content": said})
    print(f"> {question}\n{said}")
