"""Images in requests to the server: OpenAI's and Anthropic's parts, what is refused, and models that read text only."""

import base64
import io
import struct
import zlib

import httpx
import openai
import pytest
from PIL import Image

from groupax.core.settings.sampling import SamplingParams
from groupax.engine.engine import Engine
from groupax.recipes import load_recipe
from groupax.recipes.shapes.scenes import draw, scenes
from groupax.serve.app import create_app
from groupax.serve.chats import decoded_images
from groupax.serve.web import ApiError

from .test_server import listening, running

SCENE = next(scenes(7))


def png(image):
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def url_of(content, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def bomb(width, height):
    """A PNG file of a few bytes that claims to have this size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))


def noise():
    return png(Image.frombytes("L", (64, 64), bytes(range(256)) * 16))


@pytest.fixture(scope="module")
def server():
    engine = Engine.load(load_recipe("shapes").model)
    with running(engine, "shapes") as loop, listening(create_app(loop)) as address:
        yield address, engine


def chat(*parts, model="shapes", **fields):
    return {"model": model, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 12, **fields}


def text(words=SCENE.question):
    return {"type": "text", "text": words}


def picture(url):
    return {"type": "image_url", "image_url": {"url": url}}


def post(server, path, body):
    return httpx.post(f"{server[0]}{path}", json=body, timeout=120)


@pytest.mark.heavy
def test_the_clients_of_openai_and_anthropic_show_images_to_a_model(server):
    address, engine = server
    content = png(draw(SCENE))
    row = [{"role": "user", "content": [{"type": "image"}, text()]}]
    written = engine.tokenizer.apply_chat_template(row, tokenize=False, add_generation_prompt=True)
    ids, images = engine.image_encoder.encode(written, [draw(SCENE)], True)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    [sequence] = engine.sequences([ids], params)
    sequence.images = images
    [expected] = engine.stream([sequence])
    shown = [{"role": "user", "content": [{"type": "image", "image": draw(SCENE)}, text()]}]
    assert engine.generate(shown, params)[0][0].tokens == expected.tokens
    with pytest.raises(ValueError, match=r"a prompt has images, .*; give the prompt to generate"):
        engine.encode(shown)

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    answer = client.chat.completions.create(**chat(picture(url_of(content)), text(), temperature=0))
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == len(ids)

    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(content).decode()}
    body = chat({"type": "image", "source": source}, text(), temperature=0)
    answer = post(server, "/v1/messages", body).json()
    assert answer["content"] == [{"type": "text", "text": expected.text}]
    counted = post(server, "/v1/messages/count_tokens", {name: body[name] for name in ("model", "messages")})
    assert counted.json() == {"input_tokens": len(ids)}

    shown = [
        {"type": "input_image", "image_url": url_of(content), "detail": "auto"},
        {"type": "input_text", "text": SCENE.question},
    ]
    item = {"role": "user", "content": shown}
    answer = client.responses.create(model="shapes", input=[item], temperature=0, max_output_tokens=12)
    assert answer.output_text == expected.text
    assert answer.usage.input_tokens == len(ids)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([picture("https://example.com/a.png"), text()], "fetches none; send the image as a data: URL"),
        ([picture("data:image/png;base64,####"), text()], "base64 is damaged"),
        ([picture(url_of(b"no image")), text()], "not an image in one of the formats"),
        ([picture(url_of(bomb(5_000, 5_000))), text()], "5,000 x 5,000 pixels, at most 16,777,216"),
        ([picture(url_of(noise()[:-40])), text()], "is damaged"),
        (
            [picture(url_of(png(Image.new("L", (2, 2))))) for _ in range(17)] + [text()],
            "17 images; a request may have 16",
        ),
        ([{"type": "image", "image": "/etc/passwd"}, text()], "a part of a message must be {'type': 'image_url'"),
        ([text("<image> What is it?")], "tokens that stand for images"),
    ],
)
def test_what_is_no_image_of_a_message_is_refused(server, parts, message):
    answer = post(server, "/v1/chat/completions", chat(*parts))
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"], answer.text


@pytest.mark.heavy
def test_images_are_refused_where_no_model_sees_them(server):
    small = url_of(png(Image.new("RGB", (4, 4))))
    reads = Engine.load(load_recipe("arithmetic").model, chat_template="plain", kv_bytes=1 << 26)
    asked = chat(picture(small), text(), model="arithmetic")
    with running(reads, "arithmetic") as loop, listening(create_app(loop)) as address:
        answer = httpx.post(f"{address}/v1/chat/completions", json=asked, timeout=120)
    assert answer.status_code == 400
    assert "arithmetic reads text only" in answer.json()["error"]["message"]
    body = chat(picture(small), text())
    body["messages"][0]["role"] = "assistant"
    assert "has an image, and its role is 'assistant'" in post(server, "/v1/chat/completions", body).text
    source = {"type": "url", "url": "https://example.com/a.png"}
    answer = post(server, "/v1/messages", chat({"type": "image", "source": source}, text()))
    assert answer.status_code == 400
    assert "source of type url, and this server fetches none" in answer.text
    for part, message in (
        ({"file_id": "file-1"}, "this server has no files"),
        ({"image_url": {"url": small}}, "images as image_url, a data: URL"),
    ):
        item = {"role": "user", "content": [{"type": "input_image", **part}]}
        answer = post(server, "/v1/responses", {"model": "shapes", "input": [item]})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"], answer.text
    ids = {"model": "shapes", "prompt": [1, 3, 3, 5], "max_tokens": 1}
    assert "tokens that stand for images" in post(server, "/v1/completions", ids).text


def test_the_pixels_of_all_images_together_are_limited_before_any_is_decoded():
    with pytest.raises(ApiError, match="have 50,331,648 pixels together, at most 33,554,432 are read"):
        decoded_images([url_of(bomb(4096, 4096))] * 3)
