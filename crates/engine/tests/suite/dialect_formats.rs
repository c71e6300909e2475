//! How formats are recognised, and formats of few families, cut at every place.

use forebay_engine::chat::dialect::Dialect;
use forebay_testing::shared;

use crate::common::dialects::*;

#[test]
fn templates_show_their_dialect() {
    let names = ALL.map(|template| Dialect::of(template).name());
    let expected = [
        "hermes",
        "apriel",
        "qwen-xml",
        "glm",
        "minimax",
        "deepseek-dsml",
        "deepseek-v4",
        "deepseek",
        "kimi",
        "harmony",
        "llama",
        "minicpm",
        "mistral",
        "mistral",
        "mistral-json",
        "solar-open",
        "gigachat3",
        "gigachat3.1",
        "pythonic",
        "hy3",
        "hy3-preview",
        "gemma4",
        "cohere",
        "cohere-response",
        "granite",
        "hermes",
        "apriel",
        "lfm2",
        "llama",
        "none",
    ];
    assert_eq!(names, expected);
}

#[test]
fn tags_that_families_share_choose_no_dialect() {
    for template in [
        // MiniMax M3 puts a mark before each tag and nests the tags of arguments.
        "{% set mark = ']<]minimax[>[' %}{{ mark ~ '<tool_call>' }}<invoke name=\"{{ name }}\">{{ arguments }}</tool_call>",
        // A single tag does not show the format of a call.
        "<tool_call>",
        "<tool_call></tool_call>",
        // Seed has Qwen's tags for names, and different ones around calls.
        "<seed:tool_call><function=name><parameter=key>",
        "｜DSML｜",
        "<arg_key>",
        // K2 Horizon describes functions with the tags that MiniCPM uses for calls.
        "<function name=name><param name=key type=string></function><ifm|tool_calls>",
    ] {
        let dialect = Dialect::of(template);
        assert_eq!(dialect.name(), "none", "{template}");
        assert!(dialect.call_grammar("", &tools()).is_err(), "{template}");
        let text = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
        assert_eq!(read(template, text), [content(text)], "{template}");
    }
    // Templates of LFM2 need not show a call.
    for template in ["<|tool_list_start|>[…]<|tool_list_end|>", "<|im_start|>system\\nList of tools: […"]
    {
        assert_eq!(Dialect::of(template).name(), "lfm2");
    }
    // MiniMax M3 has a tag in its examples that encloses answers of ERNIE.
    assert_eq!(Dialect::of("<response>…</response><tool_call></tool_call>").name(), "none");
    // Apriel names a wrong tag in its instructions, but uses its own.
    let apriel =
        "within <tool_call></tool_call> tags: <tool_calls>[{\"name\": …, \"arguments\": …}]</tool_calls>";
    assert_eq!(Dialect::of(apriel).name(), "apriel");
}

#[test]
fn apriel() {
    let text = "Let me look.\n<tool_calls>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln]\"}, \"id\": \"1\"}, {\"name\": \"now\", \"arguments\": {}}]</tool_calls>";
    let weather = call("weather", "{\"city\": \"Köln]\"}");
    assert_eq!(read(APRIEL, text), [content("Let me look."), weather.clone(), call("now", "{}")]);
    let text = "<tool_calls>\n[\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln]\"}}\n]\n</tool_calls>Yes.";
    assert_eq!(read(APRIEL, text), [weather, content("Yes.")]);
    for text in ["<tool_calls>[]</tool_calls>", "<tool_calls>- name: now</tool_calls>", "<tool_calls>["] {
        assert_eq!(read(APRIEL, text), [content(text)]);
    }
}

#[test]
fn mistral() {
    let weather = call("weather", "{\"city\": \"Köln [TOOL_CALLS]\"}");
    for (template, id) in [(MISTRAL, ""), (MISTRAL_ID, "[CALL_ID]a1B2c3D4e")] {
        let text = format!(
            "I look.[TOOL_CALLS]weather{id}[ARGS]{{\"city\": \"Köln [TOOL_CALLS]\"}}[TOOL_CALLS]now{id}[ARGS]{{}}"
        );
        assert_eq!(read(template, &text), [content("I look."), weather.clone(), call("now", "{}")]);
        let text = format!("[TOOL_CALLS] now{id}[ARGS] [TOOL_CALLS]now{id}[ARGS]{{\"a\": [1]}} Done.");
        assert_eq!(read(template, &text), [call("now", "{}"), call("now", "{\"a\": [1]}"), content("Done.")]);
    }
    for text in [
        "A [TOOL_CALLS] tag.",
        "[TOOL_CALLS][ARGS]{}",
        "[TOOL_CALLS]now",
        "[TOOL_CALLS]now[ARG]",
        "[TOOL_CALLS]now[CALL_ID]",
    ] {
        assert_eq!(read(MISTRAL, text), [content(text)]);
    }
    assert_eq!(read(MISTRAL, "[TOOL_CALLS]now[ARGS]{\"a\": \"b"), [call("now", "{\"a\": \"b")]);
    // Reasoning has its own tags, and a call ends it.
    let thinks = format!("[THINK]{MISTRAL}");
    let text = "[THINK]Hm. <think>[/THINK]I look.[TOOL_CALLS]now[ARGS]{}";
    assert_eq!(read(&thinks, text), [reasoning("Hm. <think>"), content("I look."), call("now", "{}")]);
    assert_eq!(read(&thinks, "[THINK]Hm. [TOOL_CALLS]now[ARGS]{}"), [reasoning("Hm."), call("now", "{}")]);
}

#[test]
fn mistral_json() {
    let weather = call("weather", "{\"city\": \"Köln]\"}");
    for text in [
        "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln]\"}, \"id\": \"123456789\"}, {\"name\": \"now\", \"arguments\": {}}]",
        "[TOOL_CALLS] [{\"arguments\": {\"city\": \"Köln]\"}, \"name\": \"weather\"},\n{\"name\": \"now\"}]\n",
    ] {
        assert_eq!(read(MISTRAL_JSON, text), [weather.clone(), call("now", "{}")], "{text}");
    }
    let text = "I look. [TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}}] Done.";
    assert_eq!(read(MISTRAL_JSON, text), [content("I look."), call("now", "{}"), content("Done.")]);
    for text in ["[TOOL_CALLS]", "A [TOOL_CALLS] tag.", "[TOOL_CALLS][]", "[TOOL_CALLS][{\"a\": 1}]"] {
        assert_eq!(read(MISTRAL_JSON, text), [content(text)]);
    }
}

#[test]
fn solar() {
    let one = |name: &str, arguments: &str| {
        format!(
            "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"
        )
    };
    let calls =
        format!("<|tool_calls|>{}{}<|calls|>", one("weather", "{\"city\": \"Köln\"}"), one("now", "{}"));
    let expected = [reasoning("Hm."), call("weather", "{\"city\": \"Köln\"}"), call("now", "{}")];
    assert_eq!(read(SOLAR, &format!("<|think|>Hm.<|end|><|begin|>assistant{calls}")), expected);
    assert_eq!(read(SOLAR, &calls), expected[1..]);
    // Reasoning without an end tag, or a prompt that has started the answer.
    assert_eq!(read(SOLAR, &format!("<|think|>Hm.{calls}")), expected);
    let prompt = "<|begin|>assistant<|think|>";
    assert_eq!(parts(&Dialect::of(SOLAR), prompt, &tools(), &format!("Hm.\n{calls}")), expected);
    // Messages that are parsed with tools and without.
    let text = "<|think|>Hm.<|end|><|begin|>assistant<|content|>It is <b>.<|end|>";
    for tools in [tools(), vec![]] {
        let expected = [reasoning("Hm."), content("It is <b>.")];
        assert_eq!(parts(&Dialect::of(SOLAR), "<|begin|>assistant", &tools, text), expected);
    }
    let text =
        "<|content|>I look.<|end|><|begin|>assistant<|think|>Hm.<|end|><|begin|>assistant<|tool_calls|>";
    let text = format!("{text}{}<|calls|>", one("now", "{}"));
    assert_eq!(read(SOLAR, &text), [content("I look."), reasoning("Hm."), call("now", "{}")]);
    let text = "<|tool_call:begin|>a1b2c3d4e5<|tool_call:end|>";
    assert_eq!(read(SOLAR, text), [content(text)]);
}

#[test]
fn gigachat() {
    let object = "{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}";
    let weather = call("weather", "{\"city\": \"Köln\"}");
    for (template, before) in
        [(GIGACHAT3, "<|message_sep|>\n\nfunction call<|role_sep|>\n"), (GIGACHAT31, "<|function_call|>")]
    {
        let text = format!("I look.{before}{object}<|message_sep|>\n\n");
        assert_eq!(read(template, &text), [content("I look."), weather.clone()], "{text}");
        assert_eq!(read(template, &format!("{before}{object}")), std::slice::from_ref(&weather));
        // The end of a message is not text, even without tools.
        let text = "A function call is made.<|message_sep|>\n\n";
        for tools in [tools(), vec![]] {
            assert_eq!(
                parts(&Dialect::of(template), "", &tools, text),
                [content("A function call is made.")]
            );
        }
    }
    let text = "function call<|role_sep|>\nnow";
    assert_eq!(read(GIGACHAT3, text), [content(text)]);
}

#[test]
fn minicpm() {
    let text = "<think>\nHm.\n</think>\n\nI look.\n<function name=\"weather\"><param name=\"city\">Köln</param><param name=\"days\">2</param></function>\n<function name=\"now\"></function>";
    let expected = [
        reasoning("Hm."),
        content("I look."),
        call("weather", "{\"city\":\"Köln\",\"days\":2}"),
        call("now", "{}"),
    ];
    assert_eq!(read(MINICPM, text), expected);
    // A section contains text that looks like tags.
    let text = "<function name=\"files.write\"><param name=\"path\"><![CDATA[]]></param><param name=\"text\"><![CDATA[if a < b:\n</param></function>]]></param></function>.";
    let written = r#"{"path":"","text":"if a < b:\n</param></function>"}"#;
    assert_eq!(read(MINICPM, text), [call("files.write", written), content(".")]);
    let text = "<function name=\"weather\"><param name=\"hours\"><![CDATA[[1, 2]]]></param></function>";
    assert_eq!(read(MINICPM, text), [call("weather", "{\"hours\":[1, 2]}")]);
    // The template prints lists and objects in Python's syntax.
    let text = "<function name=\"weather\"><param name=\"place\">{'a': [1, None, 'b\\'c']}</param><param name=\"hours\">(1, 2)</param><param name=\"city\">['a']</param></function>";
    let arguments = r#"{"place":{"a":[1,null,"b'c"]},"hours":[1,2],"city":"['a']"}"#;
    assert_eq!(read(MINICPM, text), [call("weather", arguments)]);
    let text = "<function name=\"weather\"><param name=\"place\">{'a': [1, 2}</param></function>";
    assert_eq!(read(MINICPM, text), [call("weather", r#"{"place":"{'a': [1, 2}"}"#)]);
    // Documents may contain this tag, so only a known name makes it a call.
    for text in ["<function name=\"unknown\"></function>", "<function name=\"now\"", "A <function> tag."] {
        assert_eq!(read(MINICPM, text), [content(text)]);
    }
    let text = "<function name=\"weather\"><param name=\"city\">Kö";
    assert_eq!(read(MINICPM, text), [call("weather", "{\"city\":\"Kö")]);
    // A call ends reasoning without an end tag.
    let text = "Hm. <function name=\"now\"></function>";
    assert_eq!(
        parts(&Dialect::of(MINICPM), "<think>\n", &tools(), text),
        [reasoning("Hm."), call("now", "{}")]
    );
}

#[test]
fn pythonic() {
    let text = "[weather(city=\"Köln\", days=2, wind=-1.5, hourly=True, units=None, place={'x': [1, (2, 3),], 4: {}}, hours=[ ]), now()]";
    let arguments = r#"{"city":"Köln","days":2,"wind":-1.5,"hourly":true,"units":null,"place":{"x":[1,[2,3]],"4":{}},"hours":[]}"#;
    let expected = [call("weather", arguments), call("now", "{}")];
    assert_eq!(read(PYTHONIC, text), expected);
    assert_eq!(read(PYTHONIC, &format!("<|python_start|>{text}<|python_end|>")), expected);
    assert_eq!(read(PYTHONIC, &format!("\n{} \n", text.replace(", ", " , ").replace('=', " = "))), expected);
    // Strings in either quotes, with escapes, and without quotes.
    let text = r#"[weather(city='a "b" \'c\' \n\\ \x41\u00e9\U0001f999\ud83e\udd99 \d \u12', mode="it's, [now()]", units=New York, either=5.)]"#;
    let arguments = r#"{"city":"a \"b\" 'c' \n\\ \u0041\u00e9🦙\ud83e\udd99 \\d \\u12","mode":"it's, [now()]","units":"New York","either":"5."}"#;
    assert_eq!(read(PYTHONIC, text), [call("weather", arguments)]);
    // Not the whole answer, not a list, or an unknown name.
    for text in
        ["A [now()]", "now()", "[unknown()]", "[now]", "[now, then]", "[1, 2]", "[", "[now", "[] now()"]
    {
        assert_eq!(read(PYTHONIC, text), [content(text)], "{text}");
    }
    // What is not Python is emitted unchanged; what is cut off is incomplete.
    assert_eq!(read(PYTHONIC, "[now(1, a=2)]"), [call("now", "1, a=2)]")]);
    assert_eq!(read(PYTHONIC, "[now(a={1])]"), [call("now", "{\"a\":{\"1\"])]")]);
    assert_eq!(read(PYTHONIC, "[now(a=\"so"), [call("now", "{\"a\":\"so")]);
    assert_eq!(read(PYTHONIC, "[now("), [call("now", "")]);
    assert_eq!(read(PYTHONIC, "[now()"), [call("now", "{}")]);
    assert_eq!(read(PYTHONIC, "[now()] Done."), [call("now", "{}"), content("Done.")]);
    assert_eq!(read(PYTHONIC, "[now(), then!]"), [call("now", "{}"), content("!]")]);
}

#[test]
fn harmony_calls_of_undeclared_tools_are_not_text() {
    let dialect = Dialect::of(HARMONY);
    let read = |tools: &[_], text: &str| parts(&dialect, "<|start|>assistant", tools, text);
    let said = "<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
    for (head, name) in [
        ("<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>", "unknown"),
        ("<|channel|>analysis to=browser.search code<|message|>", "browser.search"),
        (" to=python<|channel|>analysis code<|message|>", "python"),
    ] {
        let text = format!("{head}{{\"a\": 1}}{said}");
        // The caller can report that there is no such tool.
        assert_eq!(read(&tools(), &text), [call(name, "{\"a\": 1}"), content("Yes.")]);
        // Without tools, it counts as reasoning.
        assert_eq!(read(&[], &text), [reasoning("{\"a\": 1}"), content("Yes.")]);
    }
    // These are not names of tools.
    for recipient in ["assistant", "user", "all"] {
        let text = format!("<|channel|>commentary to={recipient}<|message|>Yes.");
        assert_eq!(read(&tools(), &text), [content("Yes.")]);
    }
    let text = "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.";
    assert_eq!(read(&tools(), text), [reasoning("Hm.")]);
}

/// Published templates, which are not part of this repository.
#[test]
fn published_templates_choose_their_own_dialect() {
    let Some(folder) = shared("templates") else { return };
    for (template, name) in [
        ("GLM-4.6", "glm"),
        ("Kimi-K2-Instruct", "kimi"),
        ("MiniMax-M2", "minimax"),
        ("Qwen-Qwen2.5-7B-Instruct", "hermes"),
        ("Qwen-Qwen3-0.6B", "hermes"),
        ("Qwen3-Coder", "qwen-xml"),
        ("Qwen3.5-4B", "qwen-xml"),
        ("deepseek-ai-DeepSeek-V3.1", "deepseek"),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama"),
        ("moonshotai-Kimi-K2", "kimi"),
        ("openai-gpt-oss-120b", "harmony"),
    ] {
        let source = std::fs::read_to_string(folder.join(format!("{template}.jinja"))).unwrap();
        assert_eq!(Dialect::of(&source).name(), name, "{template}");
    }
}
