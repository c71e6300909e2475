//! Grammars: answers satisfy them, whatever the model would prefer.

use std::time::{Duration, Instant};

use forebay_engine::internals::generate::sampler::SamplingParams;
use forebay_engine::tokenizer::EncodeOptions;
use forebay_engine::{Answer, Engine, Error, Event, FinishReason, Grammar, Request, TokenId};
use serde_json::{Value, json};

use crate::common::engines::{DEMO, STORY, TINY};
use crate::common::schema;
use crate::common::tiny_model::TOKENS;

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

/// Makes nearly all tokens about equally likely.
fn wild(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 5.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: Some(seed),
        ..SamplingParams::default()
    }
}

fn request(engine: &Engine, grammar: Grammar, sampling: SamplingParams) -> Request {
    let text = if std::ptr::eq(engine, &*TINY) { "abc a" } else { STORY };
    let prompt = engine.tokenizer().encode(text, EncodeOptions::default()).unwrap();
    Request::new(engine, prompt).unwrap().sampling(sampling).grammar(Some(grammar))
}

fn answer(engine: &Engine, request: &Request) -> Result<Answer, Error> {
    engine.session().generate(request, &mut |_| {})
}

fn token(text: &str) -> TokenId {
    TokenId(TOKENS.iter().position(|t| *t == text).unwrap() as u32)
}

/// Strings are short and numbers are bounded, so that every answer ends.
fn schemas() -> Vec<Value> {
    let text = json!({ "type": "string", "maxLength": 6 });
    let object = |properties: Value, required: &[&str]| json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false });
    vec![
        object(
            json!({ "name": text, "age": { "type": "integer", "minimum": 0, "maximum": 150 } }),
            &["name", "age"],
        ),
        object(
            json!({ "first": { "type": "boolean" }, "second": { "type": "null" }, "third": text }),
            &["third"],
        ),
        json!({ "enum": ["red", "green", 7, null, ["x", { "y": 1.5 }]] }),
        json!({ "const": { "a": [1, "zwei"], "b": null } }),
        json!({ "type": "array", "items": text, "minItems": 2, "maxItems": 4 }),
        json!({ "type": "array", "items": { "type": "integer", "minimum": -3, "maximum": 12 }, "maxItems": 3 }),
        json!({ "type": "number", "minimum": -2, "maximum": 2, "multipleOf": 0.25 }),
        object(
            json!({ "inner": object(json!({ "deep": object(json!({ "x": { "type": "boolean" } }), &["x"]) }), &["deep"]) }),
            &["inner"],
        ),
        json!({
            "$defs": { "leaf": object(json!({ "v": text }), &["v"]), "pair": { "type": "array", "prefixItems": [{ "$ref": "#/$defs/leaf" }, { "$ref": "#/$defs/leaf" }], "items": false, "minItems": 2 } },
            "$ref": "#/$defs/pair",
        }),
        json!({ "anyOf": [object(json!({ "cat": { "const": 1 } }), &["cat"]), object(json!({ "dog": text }), &["dog"]), { "type": "boolean" }] }),
        json!({ "oneOf": [object(json!({ "kind": { "const": "a" }, "x": text }), &["kind", "x"]), object(json!({ "kind": { "const": "b" } }), &["kind"])] }),
        json!({ "type": "string", "pattern": "^[A-C]{2}-[0-9]{3}$" }),
        json!({ "type": "string", "format": "date" }),
        json!({ "type": "string", "format": "uuid" }),
        json!({ "type": ["integer", "null"], "minimum": 0, "maximum": 9 }),
    ]
}

#[test]
fn every_answer_is_json_of_its_schema() {
    for schema in schemas() {
        let grammar =
            Grammar::json_schema(&DEMO, &schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
        for sampling in [greedy(), wild(1), wild(2), wild(3)] {
            let answer = answer(&DEMO, &request(&DEMO, grammar.clone(), sampling)).unwrap();
            assert_eq!(answer.finish_reason, FinishReason::Stop, "{schema}: {}", answer.text);
            let value = serde_json::from_str(&answer.text).unwrap_or_else(|e| panic!("{e}: {}", answer.text));
            schema::validate(&schema, &schema, &value)
                .unwrap_or_else(|e| panic!("{e}: {value} for {schema}"));
        }
    }
}

#[test]
fn what_only_annotates_a_schema_is_accepted() {
    for schema in [
        json!({ "type": "integer", "format": "int64" }),
        json!({ "format": "int64" }),
        json!({ "type": "string", "format": "password", "writeOnly": true }),
        json!({ "type": "array", "items": { "type": "integer" }, "uniqueItems": false, "maxItems": 2.0 }),
        json!({ "type": "object", "propertyNames": { "type": "string" }, "additionalProperties": true }),
    ] {
        let schema = json!({ "type": "object", "properties": { "a": schema } });
        Grammar::json_schema(&DEMO, &schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
        Grammar::lark(&DEMO, &format!("start: \"a\" %json {schema}"))
            .unwrap_or_else(|e| panic!("{schema}: {e}"));
    }
    // A number in a string, as libraries write large integers and decimals.
    let decimal = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$";
    for (schema, signs) in [
        (json!({ "type": "string", "format": "int64" }), "-"),
        (json!({ "type": "string", "pattern": decimal, "maxLength": 9 }), "+-."),
    ] {
        let grammar = Grammar::json_schema(&DEMO, &schema).unwrap();
        for seed in 1..6 {
            let answer = answer(&DEMO, &request(&DEMO, grammar.clone(), wild(seed))).unwrap();
            let text: String = serde_json::from_str(&answer.text).unwrap();
            assert!(text.contains(|c: char| c.is_ascii_digit()), "{text}");
            assert!(text.chars().all(|c| c.is_ascii_digit() || signs.contains(c)), "{text}");
        }
    }
}

#[test]
fn fields_come_in_the_order_of_the_schema() {
    let fields = ["zebra", "apple", "mango"];
    let properties: serde_json::Map<_, _> =
        fields.iter().map(|name| (name.to_string(), json!({ "type": "boolean" }))).collect();
    let schema =
        json!({ "type": "object", "properties": properties, "required": ["mango", "apple", "zebra"] });
    let schema = json!({ "additionalProperties": false, "allOf": [schema] });
    let schema = &schema["allOf"][0];
    let grammar = Grammar::json_schema(&DEMO, schema).unwrap();
    for seed in 0..3 {
        let sampling = SamplingParams { logit_bias: ends_of_json(), ..wild(seed) };
        let answer = answer(&DEMO, &request(&DEMO, grammar.clone(), sampling).max_tokens(300)).unwrap();
        let places: Vec<_> = fields.iter().map(|name| answer.text.find(&format!("\"{name}\""))).collect();
        assert!(places.is_sorted() && places[0].is_some(), "{}", answer.text);
    }
}

/// A bias for characters that close JSON.
fn ends_of_json() -> Vec<(TokenId, f32)> {
    ["}", "\"", "]"].iter().filter_map(|text| DEMO.tokenizer().find(text)).map(|t| (t, 100.0)).collect()
}

#[test]
fn an_object_is_any_object_and_nothing_else() {
    let grammar = Grammar::json_object(&DEMO).unwrap();
    for seed in 0..6 {
        let sampling = SamplingParams { logit_bias: ends_of_json(), ..wild(seed) };
        let answer = answer(&DEMO, &request(&DEMO, grammar.clone(), sampling)).unwrap();
        let value: Value = serde_json::from_str(&answer.text).unwrap();
        assert!(value.is_object(), "{value}");
        assert!(answer.text.starts_with('{') && answer.text.ends_with('}'), "{:?}", answer.text);
    }
}

/// A weak model would continue with blanks for ever.
#[test]
fn blanks_are_limited() {
    let blanks: Vec<(TokenId, f32)> = (0..DEMO.vocab_size() as u32)
        .map(TokenId)
        .filter(|&t| {
            let bytes = DEMO.tokenizer().token_bytes(t);
            !bytes.is_empty() && bytes.iter().all(u8::is_ascii_whitespace)
        })
        .map(|t| (t, 1000.0))
        .collect();
    assert!(blanks.len() > 1);
    let schema = json!({ "type": "array", "items": { "type": "boolean" }, "minItems": 2, "maxItems": 2 });
    let grammar = Grammar::json_schema(&DEMO, &schema).unwrap();
    let sampling = SamplingParams { logit_bias: blanks, ..greedy() };
    let answer = answer(&DEMO, &request(&DEMO, grammar, sampling)).unwrap();
    assert_eq!(answer.finish_reason, FinishReason::Stop);
    let text = answer.text;
    assert!(text.contains("\n") && text.len() < 6 * 40, "{text:?}");
    assert!(serde_json::from_str::<Value>(&text).unwrap().is_array());
}

#[test]
fn lengths_and_stop_strings_end_an_answer_as_ever() {
    let grammar = Grammar::json_schema(&DEMO, &json!({ "const": "a long text to be written" })).unwrap();
    let request = request(&DEMO, grammar, greedy());
    let whole = answer(&DEMO, &request).unwrap();
    assert_eq!(whole.text, "\"a long text to be written\"");
    let cut = answer(&DEMO, &request.clone().max_tokens(3)).unwrap();
    assert_eq!((cut.finish_reason, cut.tokens.len()), (FinishReason::Length, 3));
    // The last token of the grammar is also the last allowed token, so the answer is complete.
    let exact = answer(&DEMO, &request.clone().max_tokens(whole.tokens.len())).unwrap();
    assert_eq!(exact.finish_reason, FinishReason::Stop);
    let stopped = answer(&DEMO, &request.clone().stop(vec![" to be".into()])).unwrap();
    assert_eq!((stopped.finish_reason, stopped.text.as_str()), (FinishReason::Stop, "\"a long text"));
    // An answer ends with its grammar even if end tokens are never chosen.
    let ignoring = answer(&DEMO, &request.ignore_end(true)).unwrap();
    assert_eq!((ignoring.finish_reason, ignoring.tokens), (FinishReason::Stop, whole.tokens));
}

#[test]
fn the_end_is_allowed_exactly_where_the_grammar_is_complete() {
    let end = |bias| SamplingParams { logit_bias: vec![(token("<end>"), bias)], ..greedy() };
    let grammar = Grammar::lark(&TINY, "start: /[ab]{3,}/").unwrap();
    // A model that prefers to end can do so after three characters.
    let soon = answer(&TINY, &request(&TINY, grammar.clone(), end(1e6))).unwrap();
    assert_eq!(soon.finish_reason, FinishReason::Stop);
    assert!((3..5).contains(&soon.text.len()), "{}", soon.text);
    let never = request(&TINY, grammar, end(-1e6)).max_tokens(20);
    let never = answer(&TINY, &never).unwrap();
    assert_eq!((never.finish_reason, never.tokens.len()), (FinishReason::Length, 20));
    assert!(never.text.bytes().all(|b| b == b'a' || b == b'b'), "{}", never.text);
}

#[test]
fn bias_chooses_among_what_is_allowed() {
    let grammar = Grammar::lark(&TINY, r#"start: "abc" | "b" | "d""#).unwrap();
    for (wanted, text) in [("b", "b"), ("d", "d"), ("abc", "abc"), ("a", "abc"), ("ab", "abc")] {
        let bias = vec![(token(wanted), 1e6), (token("."), 1e7)];
        let sampling = SamplingParams { logit_bias: bias, ..greedy() };
        assert_eq!(answer(&TINY, &request(&TINY, grammar.clone(), sampling)).unwrap().text, text);
    }
    let bias = ["a", "ab", "abc", "b", "d"].map(|t| (token(t), f32::NEG_INFINITY)).to_vec();
    let sampling = SamplingParams { logit_bias: bias, ..greedy() };
    let error = answer(&TINY, &request(&TINY, grammar, sampling)).unwrap_err().to_string();
    assert!(error.contains("logit_bias"), "{error}");
}

#[test]
fn control_tokens_are_no_text_but_can_be_named() {
    let control = DEMO.tokenizer().find("<|im_start|>").unwrap();
    assert!(DEMO.tokenizer().is_control(control));
    let bias = vec![(control, 1e6)];
    let any = Grammar::lark(&DEMO, r"start: /(.|\n)+/").unwrap();
    let sampling = SamplingParams { logit_bias: bias.clone(), ..greedy() };
    let text = answer(&DEMO, &request(&DEMO, any, sampling).max_tokens(20)).unwrap();
    assert!(!text.tokens.contains(&control), "{:?}", text.tokens);
    for source in [r#"start: <|im_start|> "yes""#.to_owned(), format!(r#"start: <[{}]> "yes""#, control.0)] {
        let named = Grammar::lark(&DEMO, &source).unwrap();
        let named = answer(&DEMO, &request(&DEMO, named, greedy())).unwrap();
        assert_eq!((named.tokens[0], named.text.as_str()), (control, "yes"));
    }
    let message = Grammar::lark(&DEMO, "start: <|no_such_token|>").unwrap_err().to_string();
    assert!(message.contains("no_such_token"), "{message}");
}

#[test]
fn a_grammar_that_the_vocabulary_cannot_spell_is_an_error() {
    let error = Grammar::json_object(&TINY).unwrap_err();
    assert!(matches!(&error, Error::Invalid(m) if m.contains("no text")), "{error}");
    // This error shows only during the answer.
    let grammar = Grammar::lark(&TINY, r#"start: "abc" "x""#).unwrap();
    let error = answer(&TINY, &request(&TINY, grammar, greedy())).unwrap_err();
    assert!(matches!(&error, Error::Invalid(m) if m.contains("after \"abc\"")), "{error}");
}

#[test]
fn answers_do_not_depend_on_who_else_is_served() {
    let grammars: Vec<Grammar> =
        schemas().iter().take(4).map(|schema| Grammar::json_schema(&DEMO, schema).unwrap()).collect();
    let requests: Vec<Request> =
        (0..8).map(|i| request(&DEMO, grammars[i % 4].clone(), wild(i as u64))).collect();
    let alone: Vec<Answer> = requests.iter().map(|request| answer(&DEMO, request).unwrap()).collect();
    std::thread::scope(|scope| {
        let together: Vec<_> = requests.iter().map(|r| scope.spawn(|| answer(&DEMO, r).unwrap())).collect();
        for (alone, together) in alone.iter().zip(together) {
            assert_eq!(alone.tokens, together.join().unwrap().tokens);
        }
    });
}

#[test]
fn probabilities_are_the_models_own() {
    let grammar = Grammar::json_schema(&DEMO, &json!({ "const": [1, 2] })).unwrap();
    let request = request(&DEMO, grammar, wild(4)).logprobs(3);
    let mut order = Vec::new();
    let mut session = DEMO.session();
    let answer = session.generate(&request, &mut |event| match event {
        Event::Token(scored) => order.push(format!("token {}", scored.token.0)),
        Event::Text(text) => order.push(text.to_owned()),
        Event::Start(_) | Event::Prompt { .. } => {}
    });
    let answer = answer.unwrap();
    let tokens: Vec<TokenId> = answer.logprobs.iter().map(|scored| scored.token).collect();
    assert_eq!(tokens, answer.tokens);
    assert_eq!(order[0], format!("token {}", tokens[0].0));
    // The model's output after the same tokens, without a grammar.
    let mut session = DEMO.session();
    let mut context = request.prompt.clone();
    for scored in &answer.logprobs {
        session.extend(&context).unwrap();
        let logits = session.logits();
        let best = logits.iter().copied().fold(f32::MIN, f32::max);
        let total = f64::from(best) + logits.iter().map(|&l| f64::from(l - best).exp()).sum::<f64>().ln();
        let expected = f64::from(logits[scored.token.0 as usize]) - total;
        assert!((f64::from(scored.logprob) - expected).abs() < 1e-4, "{scored:?}: {expected}");
        let mut ranked: Vec<u32> = (0..logits.len() as u32).collect();
        ranked.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        let top: Vec<u32> = scored.top.iter().map(|(token, _)| token.0).collect();
        assert_eq!(top, ranked[..3]);
        assert!(scored.top.is_sorted_by(|a, b| a.1 >= b.1));
        context.push(scored.token);
    }
}

#[test]
fn what_is_wrong_in_a_schema_is_named() {
    for (schema, parts) in [
        (json!({ "type": "objekt" }), vec!["at #:", "objekt"]),
        (
            json!({ "type": "object", "properties": { "a": { "type": "array", "items": { "type": "strnig" } } } }),
            vec!["#/properties/a/items", "strnig"],
        ),
        (
            json!({ "$defs": { "x": { "type": "array", "uniqueItems": true } }, "type": "object", "properties": { "a": { "$ref": "#/$defs/x" } } }),
            vec!["#/$defs/x", "uniqueItems"],
        ),
        (json!({ "anyOf": [{ "type": "string" }, { "not": {} }] }), vec!["#/anyOf/1", "not"]),
        (json!({ "type": "string", "format": "colour" }), vec!["colour"]),
        (json!({ "type": "string", "pattern": "([" }), vec!["(["]),
        (json!({ "$ref": "#/$defs/none" }), vec!["#/$defs/none"]),
        (json!({ "$ref": "other.json" }), vec!["$ref other.json"]),
        (json!({ "type": "integer", "minimum": 5, "maximum": 3 }), vec!["minimum (5)"]),
        (
            json!({ "oneOf": [{ "type": "object" }, { "type": "object", "minProperties": 1 }] }),
            vec!["oneOf", "anyOf"],
        ),
        (json!({ "$ref": "#" }), vec!["no text"]),
        (json!({ "enum": "é".repeat(200) }), vec!["enum must be an array"]),
        (json!("string"), vec!["a text", "must be an object"]),
        (json!(false), vec!["false"]),
    ] {
        match Grammar::json_schema(&DEMO, &schema) {
            Err(Error::Invalid(message)) => {
                assert!(parts.iter().all(|part| message.contains(part)), "{schema}: {message}");
            }
            other => panic!("{schema}: {other:?}"),
        }
    }
    for (source, part) in [
        ("start: a \"b\"", "unknown name: \"a\""),
        ("start: \"a\" |\nfoo bar", "foo bar"),
        ("", "no start rule"),
        ("start: start", "no text"),
        ("start: %json { \"type\": \"objekt\" }", "objekt"),
        (r#"start: "x" %json { "properties": { "a": { "type": "strnig" } } }"#, "#/properties/a: "),
        ("%llguidance { \"allow_invalid_utf8\": true }\nstart: /a/", "allow_invalid_utf8"),
    ] {
        match Grammar::lark(&DEMO, source) {
            Err(Error::Invalid(message)) => assert!(message.contains(part), "{source}: {message}"),
            other => panic!("{source}: {other:?}"),
        }
    }
    Grammar::json_schema(&DEMO, &json!(true)).unwrap();
}

/// Grammars that would explode, overflow the stack or take for ever are refused or compile quickly.
#[test]
fn hostile_grammars_end_soon() {
    let nested = |depth: usize, around: &dyn Fn(Value) -> Value| {
        (0..depth).fold(json!({ "type": "string" }), |inner, _| around(inner))
    };
    let chain = |length: usize, link: &dyn Fn(Value) -> Value| {
        let mut definitions: serde_json::Map<String, Value> = (0..length)
            .map(|i| (format!("d{i}"), link(json!({ "$ref": format!("#/$defs/d{}", i + 1) }))))
            .collect();
        definitions.insert(format!("d{length}"), json!({ "type": "string" }));
        json!({ "$defs": definitions, "$ref": "#/$defs/d0" })
    };
    let both = |i: usize| {
        let object = |name: String| json!({ "type": "object", "properties": { name: { "type": "string" } } });
        json!({ "anyOf": [object(format!("a{i}")), object(format!("b{i}"))] })
    };
    let refused = [
        // Not with `json!`, which would recurse through all of it.
        nested(5000, &|inner| Value::Object([("items".to_owned(), inner)].into_iter().collect())),
        nested(5000, &|inner| Value::Array(vec![inner])),
        chain(5000, &|link| link),
        nested(
            13,
            &|inner| json!({ "anyOf": [{ "type": "array", "items": inner }, { "type": "object", "properties": { "a": inner } }] }),
        ),
        json!({ "allOf": (0..20).map(both).collect::<Vec<_>>() }),
        json!({ "type": "integer", "multipleOf": 999_983 }),
        json!({ "allOf": [{ "type": "number", "multipleOf": 0.0997 }, { "type": "number", "multipleOf": 991 }] }),
    ];
    for schema in refused {
        let start = Instant::now();
        let error = Grammar::json_schema(&DEMO, &schema).unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        assert!(start.elapsed() < Duration::from_secs(60), "{error}");
        // Dropping a value nested this deeply would overflow the stack as well.
        std::mem::forget(schema);
    }
    let quick = [
        nested(40, &|inner| json!({ "type": "array", "items": inner })),
        chain(490, &|link| link),
        chain(490, &|link| json!({ "anyOf": [{ "oneOf": [link] }] })),
        chain(
            490,
            &|link| json!({ "type": "object", "properties": { "a": { "type": "array", "items": link } } }),
        ),
        json!({ "type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100})$" }),
        json!({ "type": "string", "pattern": "^(a|b)*a(a|b){30}c$" }),
        json!({ "type": "array", "items": { "type": "integer" }, "minItems": 100_000, "maxItems": 1_000_000 }),
        json!({ "type": "string", "minLength": 1_000_000, "maxLength": 100_000_000 }),
        json!({ "type": "integer", "multipleOf": 9973 }),
    ];
    for schema in quick {
        let start = Instant::now();
        match Grammar::json_schema(&DEMO, &schema) {
            Ok(grammar) => {
                let request = request(&DEMO, grammar, wild(7)).max_tokens(30);
                match answer(&DEMO, &request) {
                    Ok(_) => {}
                    Err(Error::Invalid(message)) => assert!(message.contains("too complex"), "{message}"),
                    Err(error) => panic!("{error}"),
                }
            }
            Err(Error::Invalid(_)) => {}
            Err(error) => panic!("{error}"),
        }
        let text = schema.to_string();
        assert!(start.elapsed() < Duration::from_secs(60), "{}", &text[..text.len().min(200)]);
    }
    let rules = |length: usize| {
        let rules: String = (0..length).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
        format!("start: r0\n{rules}r{length}: \"a\"\n")
    };
    let terminals = rules(3000).replace('r', "T").replace("sTaTt", "start").replace("staTt", "start");
    let nest = |depth: usize| format!("start: {}\"a\"{}", "(".repeat(depth), ")".repeat(depth));
    for source in [rules(3000), rules(16_000), terminals, nest(100_000), "x".repeat(300_000)] {
        let start = Instant::now();
        // Both outcomes are fine.
        if let Err(error) = Grammar::lark(&DEMO, &source) {
            assert!(matches!(error, Error::Invalid(_)), "{error}");
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{}", &source[..100]);
    }
}
