"""Which of some texts is most like a question: the cosine of their embeddings."""

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
model = client.models.list().data[0].id

texts = ["Hello, how are you?", "Hi, how are you?", "The answer is 42."]
question, *others = (entry.embedding for entry in client.embeddings.create(model=model, input=texts).data)
for text, vector in zip(texts[1:], others, strict=True):
    # Vectors have the length 1: their product is the cosine.
    print(f"{sum(a * b for a, b in zip(question, vector, strict=True)):.3f}  {text}")
