//! `forebay serve`: what clients of OpenAI's API get.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::common::call;
use crate::common::server::{LIMIT, Server, question};

const CHAT: &str = "/v1/chat/completions";

fn boat() -> Value {
    json!({ "model": "gpt-4o", "messages": question("Tell me a story about a boat."), "max_tokens": 40, "temperature": 0 })
}

/// The text of a whole answer.
#[track_caller]
fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

/// The texts of a stream, by the number of the answer.
fn texts(chunks: &[Value]) -> BTreeMap<u64, String> {
    let mut texts: BTreeMap<u64, String> = BTreeMap::new();
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let text = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        texts.entry(choice["index"].as_u64().unwrap()).or_default().push_str(text);
    }
    texts
}

#[test]
fn a_chat_is_answered_whole_or_in_pieces_with_the_same_text() {
    // What is kept of one answer would make the next one's numbers others.
    let server = Server::start(&["--prefix-cache", "off"]);
    let whole = server.post(CHAT, &boat()).ok();
    let run =
        call(&["run", "-p", "Tell me a story about a boat.", "--temp", "0", "-n", "40", "--threads", "2"])
            .success();
    assert_eq!(content(&whole), run.trim_end_matches('\n'));
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "tales-qwen3moe-Q4_K_M");
    assert!(whole["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &whole["choices"][0];
    assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(0), &json!("length")));
    assert_eq!((&choice["message"]["role"], &choice["logprobs"]), (&json!("assistant"), &Value::Null));
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], 40);
    let sum = usage["prompt_tokens"].as_u64().unwrap() + 40;
    assert_eq!(usage["total_tokens"], sum);
    assert!(usage["prompt_tokens_details"]["cached_tokens"].is_u64(), "{usage}");
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 0);
    assert_eq!(whole["timings"]["predicted_n"], 40);
    // The first of them comes of the prompt: 39 steps led to the others.
    let timing = |name: &str| whole["timings"][name].as_f64().unwrap();
    let rate = 39.0 / (timing("predicted_ms") / 1000.0);
    assert!((timing("predicted_per_second") / rate - 1.0).abs() < 1e-9, "{whole}");
    assert!(whole["experts"]["hits"].is_u64() && whole["experts"]["bytes_read"].is_u64(), "{whole}");

    let mut asked = boat();
    asked["stream_options"] = json!({ "include_usage": true });
    let stream = server.stream(CHAT, &asked);
    let header =
        |name: &str| stream.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
    assert_eq!(header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert!(header("x-request-id").is_some_and(|id| id.starts_with("req_")));
    let chunks = stream.chunks();
    let same = |name: &str| chunks.iter().all(|chunk| chunk[name] == chunks[0][name]);
    assert!(["id", "created", "model", "object"].into_iter().all(same), "{chunks:?}");
    assert_eq!(chunks[0]["object"], "chat.completion.chunk");
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": null }));
    assert_eq!(texts(&chunks)[&0], content(&whole));
    let (last, rest) = chunks.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), usage));
    assert!(rest.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
    let roles = rest.iter().filter(|chunk| chunk["choices"][0]["delta"].get("role").is_some());
    assert_eq!(roles.count(), 1);
    let finishes: Vec<_> = rest
        .iter()
        .map(|chunk| &chunk["choices"][0]["finish_reason"])
        .filter(|reason| !reason.is_null())
        .collect();
    assert_eq!(finishes, [&json!("length")]);
    assert!(rest.iter().all(|chunk| chunk["choices"][0]["delta"]["content"] != ""));
    assert_eq!(rest.last().unwrap()["timings"]["predicted_n"], 40);

    // Without being asked for, usage is not there at all.
    let chunks = server.stream(CHAT, &boat()).chunks();
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none() && chunk["choices"] != json!([])));
    // The same without /v1, and with a name that no model has.
    assert_eq!(content(&server.post("/chat/completions", &boat()).ok()), content(&whole));
}

#[test]
fn several_answers_have_seeds_that_follow_each_other() {
    let server = Server::start(&[]);
    let ask = |n: u64, seed: u64| {
        let messages = question("Tell me a story about a king.");
        json!({ "messages": messages, "max_tokens": 24, "temperature": 1.2, "seed": seed, "n": n })
    };
    let alone: Vec<String> =
        (7..10).map(|seed| content(&server.post(CHAT, &ask(1, seed)).ok()).to_owned()).collect();
    assert!(alone[0] != alone[1] && alone[1] != alone[2], "{alone:?}");
    let together = server.post(CHAT, &ask(3, 7)).ok();
    let choices = together["choices"].as_array().unwrap();
    let texts_together: Vec<_> =
        choices.iter().map(|choice| choice["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(texts_together, alone);
    // The prompt is counted once.
    let one = server.post(CHAT, &ask(1, 7)).ok();
    assert_eq!(together["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"]);
    let written: u64 = choices.len() as u64 * 24;
    assert!(together["usage"]["completion_tokens"].as_u64().unwrap() <= written);
    let chunks = server.stream(CHAT, &ask(3, 7)).chunks();
    let streamed: Vec<_> = texts(&chunks).into_values().collect();
    assert_eq!(streamed, alone);
    let indices: Vec<_> = chunks.iter().map(|chunk| chunk["choices"][0]["index"].as_u64().unwrap()).collect();
    assert!(indices.windows(2).filter(|pair| pair[0] > pair[1]).count() > 3, "not interleaved: {indices:?}");
}

#[test]
fn answers_do_not_depend_on_who_else_asks() {
    let server = Server::start(&["--expert-memory", "30%"]);
    let things = ["a cat", "a boat", "the sea", "two dogs", "a tree", "a red ball", "a king", "rain"];
    let ask = |i: usize, thing: &str| {
        let mut body =
            json!({ "messages": question(&format!("Tell me about {thing}.")), "max_tokens": 20 + 8 * i });
        body["seed"] = i.into();
        body["temperature"] = if i.is_multiple_of(2) { 0.0.into() } else { 1.0.into() };
        body
    };
    let alone: Vec<String> = things
        .iter()
        .enumerate()
        .map(|(i, thing)| content(&server.post(CHAT, &ask(i, thing)).ok()).to_owned())
        .collect();
    for _ in 0..2 {
        std::thread::scope(|scope| {
            let threads: Vec<_> = things
                .iter()
                .enumerate()
                .map(|(i, thing)| {
                    scope.spawn({
                        let server = &server;
                        move || texts(&server.stream(CHAT, &ask(i, thing)).chunks()).remove(&0).unwrap()
                    })
                })
                .collect();
            for (thread, alone) in threads.into_iter().zip(&alone) {
                assert_eq!(&thread.join().unwrap(), alone);
            }
        });
    }
}

#[test]
fn sampling_is_as_asked_for() {
    let server = Server::start(&["--temp", "0", "-n", "12"]);
    let ask = |more: Value| {
        let mut body = json!({ "messages": question("Tell me a story about a dog.") });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post(CHAT, &body).ok()
    };
    let plain = ask(json!({}));
    // The server's own settings hold where a request says nothing, and its limit where it asks for more.
    assert_eq!(content(&plain), content(&ask(json!({ "temperature": 0, "max_tokens": 500 }))));
    assert_eq!(plain["usage"]["completion_tokens"], 12);
    assert_eq!(ask(json!({ "max_tokens": -1 }))["usage"]["completion_tokens"], 12);
    assert_eq!(ask(json!({ "max_completion_tokens": 5, "max_tokens": 7 }))["usage"]["completion_tokens"], 5);
    // A stop text ends the answer before it.
    let word = content(&plain).split(' ').nth(3).unwrap().to_owned();
    let stopped = ask(json!({ "stop": word }));
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(content(&stopped), content(&plain).split(&word).next().unwrap());
    assert_eq!(content(&ask(json!({ "stop": ["none of it", word] }))), content(&stopped));
    // Without its first token the answer is another.
    let first = ask(json!({ "max_tokens": 1, "logprobs": true, "top_logprobs": 3 }));
    let likely = &first["choices"][0]["logprobs"]["content"][0];
    let text = likely["token"].as_str().unwrap();
    assert_eq!(likely["top_logprobs"][0]["token"], text);
    assert_eq!(likely["top_logprobs"].as_array().unwrap().len(), 3);
    assert_eq!(likely["bytes"], json!(text.as_bytes()));
    let logprob = likely["logprob"].as_f64().unwrap();
    assert!(logprob <= 0.0 && likely["top_logprobs"][0]["logprob"] == likely["logprob"], "{likely}");
    let id = server.post("/tokenize", &json!({ "content": text })).ok()["tokens"][0].to_string();
    let biased = ask(json!({ "logit_bias": { id: -100 }, "max_tokens": 1, "logprobs": true }));
    assert_ne!(biased["choices"][0]["logprobs"]["content"][0]["token"], text);
    assert_eq!(biased["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[test]
fn probabilities_come_with_the_text_they_belong_to() {
    let server = Server::start(&[]);
    let mut body = boat();
    body["logprobs"] = true.into();
    body["top_logprobs"] = 2.into();
    let whole = server.post(CHAT, &body).ok();
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 40);
    let joined: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(joined, content(&whole));
    let mut streamed = Vec::new();
    for chunk in server.stream(CHAT, &body).chunks() {
        let choice = &chunk["choices"][0];
        let Some(content) = choice["delta"]["content"].as_str() else { continue };
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        let joined: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
        assert_eq!(joined, content);
        streamed.extend(tokens.iter().cloned());
    }
    assert_eq!(&streamed, tokens);
}

#[test]
fn texts_are_continued_as_they_are() {
    let server = Server::start(&[]);
    let ask = |more: Value| {
        let mut body = json!({ "max_tokens": 6, "temperature": 0 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let post = |more: Value| server.post("/v1/completions", &ask(more)).ok();
    let once = post(json!({ "prompt": "Once upon a time" }));
    let run = call(&["run", "--raw", "-p", "Once upon a time", "-n", "6", "--temp", "0"]).success();
    assert_eq!(
        (&once["object"], &once["choices"][0]["text"]),
        (&json!("text_completion"), &json!(run.trim_end_matches('\n')))
    );
    assert!(once["id"].as_str().unwrap().starts_with("cmpl-"));
    let text = |answer: &Value, i: usize| answer["choices"][i]["text"].as_str().unwrap().to_owned();

    let tokens =
        server.post("/tokenize", &json!({ "content": "Once upon a time", "add_special": true })).ok();
    let by_tokens = post(json!({ "prompt": tokens["tokens"] }));
    assert_eq!(text(&by_tokens, 0), text(&once, 0));
    let several = post(json!({ "prompt": ["The cat", "Once upon a time"], "n": 2 }));
    assert_eq!(several["choices"].as_array().unwrap().len(), 4);
    assert_eq!((text(&several, 2), text(&several, 3)), (text(&once, 0), text(&once, 0)));
    assert_ne!(text(&several, 0), text(&once, 0));
    let cat = post(json!({ "prompt": "The cat" }));
    let counted = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(counted(&several), counted(&once) + counted(&cat));
    let lists = post(json!({ "prompt": [tokens["tokens"], tokens["tokens"]] }));
    assert_eq!(text(&lists, 1), text(&once, 0));
    let echoed = post(json!({ "prompt": "Once upon a time", "echo": true }));
    assert_eq!(text(&echoed, 0), format!("Once upon a time{}", text(&once, 0)));

    let scored = post(json!({ "prompt": "Once upon a time", "logprobs": 2 }));
    let likely = &scored["choices"][0]["logprobs"];
    let tokens = likely["tokens"].as_array().unwrap();
    let joined: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(joined, text(&once, 0));
    assert_eq!(likely["token_logprobs"].as_array().unwrap().len(), 6);
    assert_eq!(likely["text_offset"][1], tokens[0].as_str().unwrap().chars().count());
    assert!(likely["top_logprobs"][0].get(tokens[0].as_str().unwrap()).is_some(), "{likely}");

    let body = ask(
        json!({ "prompt": "Once upon a time", "echo": true, "stream_options": { "include_usage": true } }),
    );
    let chunks = server.stream("/v1/completions", &body).chunks();
    assert_eq!(texts(&chunks)[&0], text(&echoed, 0));
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 6);
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "length");
}

#[test]
fn the_server_tells_about_itself() {
    let server = Server::start(&["--alias", "owner/name:Q4"]);
    for prefix in ["", "/v1"] {
        let list = server.get(&format!("{prefix}/models")).ok();
        assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("owner/name:Q4")));
        let model = server.get(&format!("{prefix}/models/owner/name:Q4")).ok();
        assert_eq!((&model["object"], &model), (&json!("model"), &list["data"][0]));
        let missing = server.get(&format!("{prefix}/models/owner/other"));
        assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("model_not_found")));
    }
    let health = server.get("/health").ok();
    assert_eq!(health, json!({ "status": "ok", "state": "ready", "needs_key": false }));
    let props = server.get("/props").ok();
    assert_eq!((&props["model"], &props["n_ctx"]), (&json!("owner/name:Q4"), &json!(1024)));
    assert!(props["chat_template"].as_str().unwrap().contains("im_start"), "{props}");
    assert!(!props.to_string().contains("/models/"), "{props}");

    let said = json!({ "content": "The moon is <|im_end|> round.", "with_pieces": true });
    let tokens = server.post("/tokenize", &said).ok();
    let ids: Vec<_> = tokens["tokens"].as_array().unwrap().iter().map(|token| token["id"].clone()).collect();
    assert_eq!(tokens["count"], ids.len());
    let back = server.post("/detokenize", &json!({ "tokens": ids })).ok();
    assert_eq!(back["content"], "The moon is <|im_end|> round.");
    let literal = server.post("/tokenize", &json!({ "content": "<|im_end|>", "parse_special": false })).ok();
    assert!(literal["count"].as_u64().unwrap() > 1, "{literal}");
    let prompt = server.post("/apply-template", &json!({ "messages": question("Hi") })).ok();
    assert!(prompt["prompt"].as_str().unwrap().contains("Hi"), "{prompt}");
    let counted = server.post("/tokenize", &json!({ "messages": question("Hi") })).ok();
    let answer = server.post(CHAT, &json!({ "messages": question("Hi"), "max_tokens": 1 })).ok();
    assert_eq!(counted["count"], answer["usage"]["prompt_tokens"]);

    let metrics = server.get("/metrics");
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain"));
    assert_eq!(server.metric("forebay_generated_tokens_total"), 1.0);
    assert_eq!(server.metric("forebay_requests_total{path=\"/v1/chat/completions\",status=\"200\"}"), 1.0);
    // The prompt and its one token took a step, which is counted when it has ended.
    server.wait_for_metric("forebay_step_seconds_count", 1.0, LIMIT);
    assert!(server.metric("forebay_expert_hits_total") > 0.0);
    let described = server.get("/openapi.json").ok();
    for (path, methods) in described["paths"].as_object().unwrap() {
        let path = path.replace("{id}", "owner/name:Q4");
        for (method, _) in methods.as_object().unwrap() {
            let answer = server.call(&method.to_ascii_uppercase(), &path, &[], b"");
            assert!(![404, 405, 500].contains(&answer.status), "{method} {path}: {}", answer.text());
        }
    }
}

#[test]
fn conversations_of_all_shapes_are_understood() {
    let server = Server::start(&[]);
    let prompt = |messages: Value| {
        server.post("/apply-template", &json!({ "messages": messages })).ok()["prompt"].clone()
    };
    let plain = prompt(
        json!([{ "role": "system", "content": "Be brief.\nBe kind." }, { "role": "user", "content": "Hi" }]),
    );
    let parts = json!([{ "type": "text", "text": "Be brief." }, { "type": "text", "text": "Be kind." }]);
    let dressed = json!([
        { "role": "developer", "content": parts },
        { "role": "user", "content": [{ "type": "text", "text": "Hi" }] },
    ]);
    assert_eq!(prompt(dressed), plain);
    let billed = json!([
        { "role": "system", "content": "x-anthropic-billing-header: cch=12ab;\nBe brief.\nBe kind." },
        { "role": "user", "content": "Hi" },
    ]);
    assert_eq!(prompt(billed), plain);
}
