//! Formats of the newer families, cut at every place.

use forebay_engine::chat::dialect::Dialect;
use forebay_testing::vectors;
use serde_json::Value;

use crate::common::dialects::*;

/// The parts of an answer after this prompt.
fn after(template: &str, prompt: &str, text: &str) -> Vec<Part> {
    parts(&Dialect::of(template), prompt, &tools(), text)
}

#[test]
fn hy3() {
    for (template, suffix) in [(HY3, ":opensource"), (HY3_PREVIEW, "")] {
        let tagged = |text: &str| text.replace('>', &format!("{suffix}>")).replace('@', ">");
        let text = tagged(
            "I look.<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Köln @ \n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
        );
        let expected =
            [content("I look."), call("weather", "{\"city\":\"Köln > \\n\",\"days\":2}"), call("now", "{}")];
        assert_eq!(read(template, &text), expected);
        assert_eq!(read(template, &text.replace(">\n<", "><")), expected);
        // The prompt decides whether the model reasons.
        let open = tagged("<think>");
        let ended = tagged(&format!("Hm.</think>{}", "I look."));
        assert_eq!(after(template, &open, &ended), [reasoning("Hm."), content("I look.")]);
        assert_eq!(after(template, &tagged("<think></think>"), &text), expected);
        // Text that is no call, and a call that is cut off.
        for text in ["A <tool_call> tag.", "<tool_calls>no</tool_calls>", "<tool_call>unknown<tool_sep>"] {
            assert_eq!(read(template, &tagged(text)), [content(&tagged(text))]);
        }
        let cut =
            tagged("<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Kö");
        assert_eq!(read(template, &cut), [call("weather", "{\"city\":\"Kö")]);
    }
    // Tags without the suffix are text.
    let text = "<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>";
    assert_eq!(read(HY3, text), [content(text)]);
}

#[test]
fn gemma4() {
    let text = "<|tool_call>call:weather{city:<|\"|>Köln \"am\" {Rhein}, 'x:1'\n<|\"|>,days:-2,wind:1.5e1,hourly:true,units:null,place:{<|\"|>a b<|\"|>:[1,<|\"|>},<|\"|>,{}],c:{d:None}},hours:[],either:[ 1 , [true]]}<tool_call|><|tool_call>call:now{}<tool_call|>";
    let arguments = r#"{"city":"Köln \"am\" {Rhein}, 'x:1'\n","days":-2,"wind":1.5e1,"hourly":true,"units":null,"place":{"a b":[1,"},",{}],"c":{"d":null}},"hours":[],"either":[1,[true]]}"#;
    assert_eq!(read(GEMMA4, text), [call("weather", arguments), call("now", "{}")]);
    // Between text, with white space, with forgotten quotes and with a forgotten tag.
    let text = "I look. <|tool_call> call:weather{ city : New York , days:2 } <tool_call|>\n<|tool_call>call:now{} Done.";
    let weather = call("weather", r#"{"city":"New York","days":2}"#);
    assert_eq!(read(GEMMA4, text), [content("I look."), weather, call("now", "{}"), content("Done.")]);
    // No calls.
    for text in [
        "The tag <|tool_call> begins a call.",
        "<|tool_call>call:now<tool_call|>",
        "<|tool_call>call:{}<tool_call|>",
        "<|tool_call>call:two words{}<tool_call|>",
        "<|tool_call>now{}<tool_call|>",
        "<|tool_call>call:no",
    ] {
        assert_eq!(read(GEMMA4, text), [content(text)], "{text}");
    }
    // What is broken is emitted unchanged; what is cut off is incomplete.
    let broken = "<|tool_call>call:now{a:1]}<tool_call|>.";
    assert_eq!(read(GEMMA4, broken), [call("now", "{\"a\":1]}"), content(".")]);
    assert_eq!(read(GEMMA4, "<|tool_call>call:now{a}<tool_call|>"), [call("now", "{a}")]);
    assert_eq!(read(GEMMA4, "<|tool_call>call:now{a:<|\"|>so<|"), [call("now", "{\"a\":\"so<|")]);
    assert_eq!(read(GEMMA4, "<|tool_call>call:now{a:12"), [call("now", "{\"a\":")]);
    assert_eq!(read(GEMMA4, "<|tool_call>call:now{"), [call("now", "{")]);
}

#[test]
fn gemma4_reasons_in_a_channel() {
    let now = "<|tool_call>call:now{}<tool_call|>";
    let text = format!("<|channel>thought\nHm.\n<channel|>I look.{now}");
    let expected = [reasoning("Hm."), content("I look."), call("now", "{}")];
    assert_eq!(read(GEMMA4, &text), expected);
    assert_eq!(after(GEMMA4, "<|turn>model\n<|channel>thought\n", &text[18..]), expected);
    // The prompt, or the model, has closed an empty channel.
    for (prompt, start) in [("<|channel>thought\n<channel|>", ""), ("", "<|channel>thought\n<channel|>")] {
        assert_eq!(after(GEMMA4, prompt, &format!("{start}Yes.")), [content("Yes.")]);
    }
    // A call inside reasoning ends it, and the end that comes later is dropped.
    let text = format!("<|channel>thought\nHm. {now}<channel|>Yes.");
    assert_eq!(read(GEMMA4, &text), [reasoning("Hm."), call("now", "{}"), content("Yes.")]);
    // After an answer come tags that are not text, or reasoning.
    for (text, more) in [
        ("Yes.<channel|>", None),
        ("Yes.<|channel>thought\n<channel|>", None),
        ("Yes.\n<|channel>thought\n<channel|><channel|>", None),
        ("Yes.<|channel>thought\nHm.<channel|>", Some(reasoning("Hm."))),
    ] {
        for tools in [tools(), vec![]] {
            let expected: Vec<Part> = [content("Yes.")].into_iter().chain(more.clone()).collect();
            assert_eq!(parts(&Dialect::of(GEMMA4), "", &tools, text), expected, "{text}");
        }
    }
}

#[test]
fn cohere() {
    let one = "{\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {\"city\": \"Köln\"}}";
    let two = "{\"tool_call_id\": \"1\", \"tool_name\": \"now\", \"parameters\": {}}";
    let calls = format!("<|START_ACTION|>[\n    {one},\n    {two}\n]<|END_ACTION|>");
    let expected = [reasoning("Hm."), call("weather", "{\"city\": \"Köln\"}"), call("now", "{}")];
    for (template, open, close) in [
        (COHERE, "<|START_TEXT|>", "<|END_TEXT|>"),
        (COHERE_RESPONSE, "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ] {
        let template = format!("<|START_THINKING|>{template}");
        let read = |prompt: &str, text: &str| after(&template, prompt, text);
        assert_eq!(read("<|START_THINKING|>", &format!("Hm.<|END_THINKING|>{calls}")), expected);
        assert_eq!(read("", &format!("<|START_THINKING|>Hm.<|END_THINKING|>{calls}")), expected);
        assert_eq!(read("<|START_THINKING|>", &format!("Hm.{calls}")), expected);
        assert_eq!(read("<|START_THINKING|><|END_THINKING|>", &calls), expected[1..]);
        // Tags around the answer are not text, with tools and without.
        for text in [format!("{open}It is <b>.{close}"), format!("{open}\nIt is <b>.")] {
            for tools in [tools(), vec![]] {
                let parts = parts(&Dialect::of(&template), "", &tools, &text);
                assert_eq!(parts, [content("It is <b>.")], "{text}");
            }
        }
    }
    // The key of the name is this family's.
    for text in ["<|START_ACTION|>[{\"name\": \"now\"}]<|END_ACTION|>", "<|START_ACTION|>[]<|END_ACTION|>"] {
        assert_eq!(read(COHERE, text), [content(text)]);
    }
    let cut = "<|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"now\", ";
    assert_eq!(read(COHERE, cut), [call("now", "")]);
}

#[test]
fn granite() {
    let weather = call("weather", "{\"city\": \"Köln\"}");
    for text in [
        "<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}, {\"name\": \"now\", \"arguments\": {}}]",
        "<|tool_call|> [\n    {\n        \"name\": \"weather\",\n        \"arguments\": {\"city\": \"Köln\"}\n    },\n    {\"name\": \"now\"}\n]\n",
        "<tool_call>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}, {\"name\": \"now\"}]",
    ] {
        assert_eq!(read(GRANITE, text), [weather.clone(), call("now", "{}")], "{text}");
    }
    let text = "<think>Hm.</think>\n<response>It is.</response>";
    assert_eq!(read(GRANITE, text), [reasoning("Hm."), content("It is.")]);
    for text in ["<|tool_call|>[]", "A <|tool_call|> tag."] {
        assert_eq!(read(GRANITE, text), [content(text)]);
    }
}

#[test]
fn answers_between_tags() {
    let call_text = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n";
    let text = "Hm.\n</think>\n\n\n<response>\nIt is <b>.\n\nYes.\n</response>\n";
    let expected = [reasoning("Hm."), content("It is <b>.\n\nYes.")];
    assert_eq!(after(ERNIE, "<think>\n", text), expected);
    assert_eq!(parts(&Dialect::of(ERNIE), "<think>\n", &[], text), expected);
    let calls = format!("Hm.\n</think>\n\n{call_text}");
    assert_eq!(after(ERNIE, "<think>\n", &calls), [reasoning("Hm."), call("now", "{}")]);
    let both = format!("</think><response>I look.</response>\n{call_text}");
    assert_eq!(after(ERNIE, "<think>", &both), [content("I look."), call("now", "{}")]);
    // The tags are text anywhere else, and in answers that are not between tags.
    for text in ["The tag <response> and </response>.", "Yes.</response>"] {
        assert_eq!(read(ERNIE, text), [content(text)]);
    }
    assert_eq!(read(ERNIE, "<response>a</response></response>"), [content("a</response>")]);
    assert_eq!(read(HERMES, "<response>a</response>"), [content("<response>a</response>")]);
}

#[test]
fn hunyuan_a13b() {
    let text = "<think>\nHm.\n</think>\n<answer>\nIt is.\n</answer>";
    assert_eq!(read(HUNYUAN, text), [reasoning("Hm."), content("It is.")]);
    assert_eq!(
        after(HUNYUAN, "<think>\n\n</think>\n", "<answer>\n助手：It is.\n</answer>"),
        [content("It is.")]
    );
    assert_eq!(read(HUNYUAN, "助手：助 is."), [content("助 is.")]);
    let calls = "<tool_calls>[{\"name\": \"now\", \"arguments\": {}}]</tool_calls>";
    let expected = [reasoning("Hm."), call("now", "{}")];
    assert_eq!(read(HUNYUAN, &format!("<think>\nHm.\n</think>\n{calls}")), expected);
    assert_eq!(read(HUNYUAN, &format!("<think>Hm.</think><answer>{calls}</answer>")), expected);
}

#[test]
fn lfm2() {
    let text = "I look.<|tool_call_start|>[weather(city=\"Köln\", days=2, hourly=true, units=null, place={\"a\": [1, None]}), now()]<|tool_call_end|>Done.";
    let arguments = r#"{"city":"Köln","days":2,"hourly":true,"units":null,"place":{"a":[1,null]}}"#;
    let expected = [content("I look."), call("weather", arguments), call("now", "{}"), content("Done.")];
    assert_eq!(read(LFM2, text), expected);
    // Quotes inside strings, because the template does not mark them.
    let text = "<|tool_call_start|>[weather(city='it's \"so\" , 'a' b'  , mode='')]<|tool_call_end|>";
    let arguments = "{\"city\":\"it's \\\"so\\\" , 'a' b\",\"mode\":\"\"}";
    assert_eq!(read(LFM2, text), [call("weather", arguments)]);
    // The tag suffices: the name need not be known, and a list without the tag is text.
    let text = "<think>Hm.</think><|tool_call_start|>[unknown(a=1)]<|tool_call_end|>";
    assert_eq!(read(LFM2, text), [reasoning("Hm."), call("unknown", "{\"a\":1}")]);
    for text in [
        "[now()]",
        "<|tool_call_start|>now()<|tool_call_end|>",
        "A <|tool_call_start|> tag.",
        "<|tool_call_sta",
    ] {
        assert_eq!(read(LFM2, text), [content(text)], "{text}");
    }
    // What is not Python is emitted unchanged up to the tag.
    let text = "<|tool_call_start|>[now(1, a=2)]<|tool_call_end|>Done.";
    assert_eq!(read(LFM2, text), [call("now", "1, a=2)]"), content("Done.")]);
    assert_eq!(read(LFM2, "<|tool_call_start|>[now(a='so' "), [call("now", "{\"a\":\"so")]);
}

#[test]
fn llama4() {
    let weather = "{\"name\": \"weather\", \"parameters\": {\"city\": \"Köln\"}}";
    let expected = [call("weather", "{\"city\": \"Köln\"}"), call("now", "{}")];
    let calls = format!("{weather}{{\"name\": \"now\", \"parameters\": {{}}}}");
    assert_eq!(read(LLAMA4, &calls), expected);
    assert_eq!(read(LLAMA4, &format!("<|python_start|><|python_end|>{calls}")), expected);
    let text = format!("<|python_start|>I look.<|python_end|>{weather}");
    assert_eq!(read(LLAMA4, &text), [content("I look."), expected[0].clone()]);
    assert_eq!(read(LLAMA4, "It is {\"a\": 1}."), [content("It is {\"a\": 1}.")]);
}

/// Published templates, which `tools/vectors` collects.
#[test]
fn published_templates_of_these_families_choose_their_dialect() {
    let Some(path) = vectors("FOREBAY_DIALECT_VECTORS", "dialect_vectors.py") else { return };
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let templates = file["templates"].as_array().unwrap();
    for (template, name) in [
        ("Cohere2MoE", "cohere"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "cohere-response"),
        ("LFM2-8B-A1B", "lfm2"),
        ("LFM2.5-8B-A1B", "lfm2"),
        ("LFM2.5-Instruct", "lfm2"),
        ("MiniMax-M3", "none"),
        ("Qwen3.5-4B", "qwen-xml"),
        ("StepFun3.5-Flash", "qwen-xml"),
        ("google-gemma-2-2b-it", "none"),
        ("google-gemma-4-31B-it", "gemma4"),
        ("google-gemma-4-31B-it-interleaved", "gemma4"),
        ("ibm-granite-granite-3.3-2B-Instruct", "granite"),
        ("ibm-granite-granite-4.0", "hermes"),
        ("ibm-granite-granite-4.1", "hermes"),
        ("inclusionai-ling-3.0-flash", "glm"),
        ("llama4", "llama"),
        ("microsoft-Phi-3.5-mini-instruct", "none"),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "mistral"),
        ("poolside-Laguna-S-2.1", "glm"),
        ("poolside-Laguna-XS-2.1", "glm"),
        ("poolside-Laguna-XS.2", "glm"),
        ("tencent-Hy3", "hy3"),
        ("upstage-Solar-Open-100B", "solar-open"),
    ] {
        let found = templates.iter().find(|found| found["template"] == format!("{template}.jinja"));
        let source = found.unwrap_or_else(|| panic!("tools/vectors makes none of {template}"));
        assert_eq!(Dialect::of(source["source"].as_str().unwrap()).name(), name, "{template}");
    }
}
