"""A chat server that serves a real checkpoint with transformers, in OpenAI's form: `checkpoint_endpoint.py FOLDER KEY`.

Prints its port, then serves on the loopback interface until it is terminated.
"""

import socket
import sys
import threading
import time
from typing import Any

import torch
import transformers
import uvicorn
from fastapi import FastAPI, Header
from fastapi.responses import JSONResponse
from pydantic import BaseModel

MODEL = "tiny"


class Chat(BaseModel):
    model: str
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    seed: int
    stream: bool = False
    stop: list[str] = []


def application(folder: str, key: str) -> FastAPI:
    torch.set_num_threads(1)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    app, one_at_a_time = FastAPI(), threading.Lock()

    @app.post("/v1/chat/completions")
    def complete(chat: Chat, authorization: str = Header("")) -> JSONResponse:
        if authorization != f"Bearer {key}":
            return error(401, "invalid_api_key", f"Incorrect API key provided: {authorization[7:]}")
        if chat.model != MODEL:
            return error(404, "model_not_found", f"The model `{chat.model}` does not exist")
        told = tokenizer.apply_chat_template(
            chat.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        read = told["input_ids"].shape[1]
        most = model.config.max_position_embeddings
        if read + chat.max_tokens > most:
            return error(400, "context_length_exceeded", f"This model's maximum context length is {most} tokens.")
        sampling = {"do_sample": True, "temperature": chat.temperature} if chat.temperature else {"do_sample": False}
        with one_at_a_time, torch.inference_mode():
            transformers.set_seed(chat.seed)
            if chat.stop:
                sampling |= {"stop_strings": chat.stop, "tokenizer": tokenizer}
            written = model.generate(**told, max_new_tokens=chat.max_tokens, **sampling)[0, read:]
        ended = int(written[-1]) == tokenizer.eos_token_id
        text = tokenizer.decode(written[:-1] if ended else written, skip_special_tokens=False)
        for stop in chat.stop:
            before, found, _ = text.partition(stop)
            text, ended = (before, True) if found else (text, ended)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop" if ended else "length"}
        usage = {"prompt_tokens": read, "completion_tokens": len(written), "total_tokens": read + len(written)}
        return JSONResponse(
            {
                "id": "chatcmpl-0",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": MODEL,
                "choices": [choice],
                "usage": usage,
            }
        )

    return app


def error(status: int, code: str, message: str) -> JSONResponse:
    told = {"message": message, "type": "invalid_request_error", "code": code}
    return JSONResponse({"error": told}, status_code=status)


def main() -> None:
    folder, key = sys.argv[1:]
    app = application(folder, key)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


if __name__ == "__main__":
    main()
