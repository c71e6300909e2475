//! Bodies of OpenAI's API, answered without HTTP.

use std::task::Poll;
use std::time::Duration;

use forebay_engine::{Driver, DriverOptions, Error, Prompter};
use forebay_server::openai::{Answers, Endpoint};
use forebay_server::{Body, Caller, Server, ServerOptions, http};
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::engine;

fn driver() -> Driver {
    Driver::start(&engine(), DriverOptions::new(4)).unwrap()
}

/// The same bodies for both.
fn bodies() -> Vec<(Endpoint, &'static str, Value)> {
    let chat = json!({
        "messages": [{ "role": "user", "content": "Tell me a story." }],
        "max_tokens": 6, "temperature": 0, "n": 2, "logprobs": true, "top_logprobs": 2,
    });
    let text = json!({ "prompt": ["One day", "The cat"], "max_tokens": 5, "temperature": 0, "echo": true });
    let scored = json!({ "prompt": "One day", "max_tokens": 5, "temperature": 0, "logprobs": 1 });
    vec![
        (Endpoint::Chat, "/v1/chat/completions", chat),
        (Endpoint::Completions, "/v1/completions", text),
        (Endpoint::Completions, "/v1/completions", scored),
    ]
}

/// Without what differs from answer to answer. The chunks of several answers are sorted by answer.
fn comparable(mut items: Vec<Value>) -> Vec<Value> {
    for item in &mut items {
        let fields = item.as_object_mut().unwrap();
        assert!(fields.contains_key("id") && fields.contains_key("created"), "{fields:?}");
        fields.retain(|name, _| !["id", "created", "timings", "experts"].contains(&name.as_str()));
    }
    items.sort_by_key(|item| item["choices"][0]["index"].as_u64());
    items
}

#[test]
fn answers_are_those_of_the_server() {
    let driver = driver();
    let server = Server::new("tales", ServerOptions::new()).unwrap();
    let _running = server.start(Prompter::new(driver.engine()), None).unwrap();
    let runtime = forebay_server::runtime().unwrap();
    for (endpoint, path, mut body) in bodies() {
        for is_stream in [false, true] {
            if is_stream {
                body["stream"] = json!(true);
                body["stream_options"] = json!({ "include_usage": true });
            }
            let answers = Answers::ask(&driver, "tales", endpoint, body.clone()).unwrap();
            assert_eq!(answers.is_stream(), is_stream);
            // As they look in a response: numbers lose a bit on their way through text.
            let as_sent = |item: Value| serde_json::from_str(&item.to_string()).unwrap();
            let own: Vec<Value> = answers.map(|item| as_sent(item.unwrap())).collect();
            let request = http::Request::post(path).body(Body::from(body.to_string())).unwrap();
            let response = runtime.block_on(server.handle(request, Caller::trusted()));
            let text = runtime.block_on(response.into_body().collect()).unwrap().to_bytes();
            let text = String::from_utf8(text.to_vec()).unwrap();
            let theirs: Vec<Value> = match is_stream {
                false => vec![serde_json::from_str(&text).unwrap()],
                true => {
                    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
                    data.filter(|data| *data != "[DONE]")
                        .map(|data| serde_json::from_str(data).unwrap())
                        .collect()
                }
            };
            assert!(own.len() == 1 || is_stream);
            assert_eq!(comparable(own), comparable(theirs), "{path}, {is_stream}");
        }
    }
}

#[test]
fn a_wrong_field_is_named() {
    let driver = driver();
    let refused = |body: Value| match Answers::ask(&driver, "tales", Endpoint::Chat, body).err() {
        Some(Error::Field { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    let messages = json!([{ "role": "user", "content": "Hello" }]);
    assert_eq!(refused(json!({ "messages": messages, "temperature": "hot" })), "temperature");
    assert_eq!(refused(json!({ "messages": messages, "grammar": "root ::= x" })), "grammar");
    assert_eq!(refused(json!({ "messages": [] })), "messages");
}

#[test]
fn whoever_waits_may_look_elsewhere_meanwhile() {
    let driver = driver();
    let body =
        json!({ "messages": [{ "role": "user", "content": "Hello" }], "ignore_eos": true, "max_tokens": 40 });
    let mut answers = Answers::ask(&driver, "tales", Endpoint::Chat, body).unwrap();
    let mut waited = 0;
    let item = loop {
        match answers.next_within(Duration::ZERO) {
            Poll::Pending => waited += 1,
            Poll::Ready(item) => break item.unwrap().unwrap(),
        }
        std::thread::yield_now();
    };
    assert!(waited > 0);
    assert_eq!(item["usage"]["completion_tokens"], 40);
    assert!(answers.next().is_none());
}

#[test]
fn the_end_of_the_driver_is_an_error() {
    let driver = driver();
    let body =
        json!({ "messages": [{ "role": "user", "content": "Hello" }], "ignore_eos": true, "stream": true });
    let mut answers = Answers::ask(&driver, "tales", Endpoint::Chat, body).unwrap();
    assert!(answers.next().unwrap().is_ok());
    driver.leave();
    let error = answers.find_map(Result::err);
    assert!(matches!(error, Some(Error::Cancelled)), "{error:?}");
    assert!(answers.next().is_none(), "an error is the last item");
}
