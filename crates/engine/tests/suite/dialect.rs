//! Parses answers in the format of each family, cut at every place.

use forebay_engine::chat::dialect::Dialect;
use forebay_testing::vectors;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::common::dialects::*;

#[test]
fn hermes() {
    let text = "Let me look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\", \"days\": 2}}\n</tool_call>";
    let weather = call("weather", "{\"city\": \"Köln\", \"days\": 2}");
    assert_eq!(read(HERMES, text), [content("Let me look."), weather.clone()]);
    // Several calls, text between them, and white space around them.
    let text = "<think>\nHm.\n</think>\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n<tool_call>{\"name\":\"now\"}</tool_call> And \n\n<tool_call>{\"arguments\": {\"a\": [1, \"}\"]} , \"name\": \"x\"}</tool_call>\n";
    let expected = [
        reasoning("Hm."),
        call("now", "{}"),
        call("now", "{}"),
        content("And"),
        call("x", "{\"a\": [1, \"}\"]}"),
    ];
    assert_eq!(read(HERMES, text), expected);
    // Arguments in a string, null, and with other keys around.
    let text =
        r#"<tool_call>{"id": 3, "name": "now", "arguments": "{\"a\": \"\\n\"}", "b": [{}]}</tool_call>"#;
    assert_eq!(read(HERMES, text), [call("now", r#"{"a": "\n"}"#)]);
    let text = r#"<tool_call>{"name": "now", "arguments": null}</tool_call>"#;
    assert_eq!(read(HERMES, text), [call("now", "{}")]);
    let text = r#"<tool_call>{"name": "now", "arguments": ""}</tool_call>"#;
    assert_eq!(read(HERMES, text), [call("now", "{}")]);
    // A tag inside a string belongs to the string.
    let text = r#"<tool_call>{"name": "now", "arguments": {"a": "</tool_call>\""}}</tool_call>x"#;
    assert_eq!(read(HERMES, text), [call("now", r#"{"a": "</tool_call>\""}"#), content("x")]);
    // Two objects between the tags.
    let text = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(read(HERMES, text), [call("now", "{}"), call("now", "{}")]);
}

#[test]
fn malformed_hermes() {
    // A missing bracket, an extra one, a missing closing tag.
    for text in [
        "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}}}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}}",
    ] {
        assert_eq!(read(HERMES, text), [call("now", "{\"a\": 1}")]);
    }
    // No calls.
    for text in [
        "The tag <tool_call> begins a call.",
        "<tool_call>\n{'name': 'now'}\n</tool_call>",
        "<tool_call>{\"arguments\": {\"a\": 1}}</tool_call>",
        "<tool_call>{\"name\": 3}</tool_call>",
        "<tool_call>{\"name\": \"\"}</tool_call>",
        "<tool_call>[]</tool_call>",
        "a  <tool_call></tool_call>  b",
        "<tool_call>{\"name\"",
        "<tool_call> \n",
        "<tool_call",
    ] {
        assert_eq!(read(HERMES, text), [content(text)]);
    }
    // One that is no call, and one that is.
    let text = "<tool_call>oh <tool_call>{\"name\": \"now\"}</tool_call>";
    assert_eq!(read(HERMES, text), [content("<tool_call>oh"), call("now", "{}")]);
    // Broken inside, and cut off at the end.
    let text = "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": [1}, 'b'}}</tool_call>c";
    assert_eq!(read(HERMES, text), [call("now", "{\"a\": [1}, 'b'}}"), content("c")]);
    let text = "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": \"some te";
    assert_eq!(read(HERMES, text), [call("now", "{\"a\": \"some te")]);
    let text = "<tool_call>{\"name\": \"now\", \"argu";
    assert_eq!(read(HERMES, text), [call("now", "")]);
}

#[test]
fn qwen_xml() {
    let text = "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln \"am\" Rhein\n</parameter>\n<parameter=days>\n2\n</parameter>\n<parameter=wind>\n1.50\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n<parameter=units>\nNone\n</parameter>\n<parameter=place>\n{\"x\": [1, 2]}\n</parameter>\n<parameter=hours>\n[1, 2]\n</parameter>\n<parameter=limit>\nnull\n</parameter>\n<parameter=mode>\na\n</parameter>\n<parameter=level>\n2\n</parameter>\n<parameter=either>\n5\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>";
    let arguments = r#"{"city":"Köln \"am\" Rhein","days":2,"wind":1.50,"hourly":true,"units":null,"place":{"x": [1, 2]},"hours":[1, 2],"limit":null,"mode":"a","level":2,"either":5}"#;
    let expected = [content("I look."), call("weather", arguments), call("now", "{}")];
    assert_eq!(read(QWEN, text), expected);
    // Line breaks inside and at the ends of a string.
    let text = "<tool_call>\n<function=files.write>\n<parameter=path>\n/a\n</parameter>\n<parameter=text>\n\n\tif a < b:\n</param\n\n</parameter>\n</function>\n</tool_call>";
    let written = r#"{"path":"/a","text":"\n\tif a < b:\n</param\n"}"#;
    assert_eq!(read(QWEN, text), [call("files.write", written)]);
    // Values that do not fit their schema, and values without a schema.
    let text = "<tool_call><function=weather><parameter=days>two</parameter><parameter=hourly>1</parameter><parameter=other>3</parameter><parameter=more>three</parameter><parameter=units></parameter><parameter=city>null</parameter><parameter=either>five</parameter></function></tool_call>";
    let arguments =
        r#"{"days":"two","hourly":1,"other":3,"more":"three","units":"","city":"null","either":"five"}"#;
    assert_eq!(read(QWEN, text), [call("weather", arguments)]);
    let text = "<tool_call><function=unknown><parameter=a>true</parameter><parameter=b>{\"c\": 1}</parameter><parameter=d>{c}</parameter></function></tool_call>";
    assert_eq!(read(QWEN, text), [call("unknown", r#"{"a":true,"b":{"c": 1},"d":"{c}"}"#)]);
}

#[test]
fn malformed_qwen_xml() {
    // Missing closing tags, missing tags around calls, two calls in one.
    let text = "<tool_call>\n<function=weather>\n<parameter=city>\nA\n<parameter=days>\n2\n</function>\n</tool_call>";
    let weather = call("weather", r#"{"city":"A","days":2}"#);
    assert_eq!(read(QWEN, text), std::slice::from_ref(&weather));
    let text = "<function=weather>\n<parameter=city>\nA\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>";
    assert_eq!(read(QWEN, text), std::slice::from_ref(&weather));
    let text = "<tool_call><function=now></function><function=now></function></tool_call>.";
    assert_eq!(read(QWEN, text), [call("now", "{}"), call("now", "{}"), content(".")]);
    let text =
        "<tool_call><function=now></tool_call><tool_call><function=now><tool_call><function=now></function>";
    assert_eq!(read(QWEN, text), [call("now", "{}"), call("now", "{}"), call("now", "{}")]);
    // No calls.
    for text in [
        "The tag <function=x> is one, and <tool_call>, too.",
        "<tool_call>\n<function>now</function>",
        "<tool_call>\n<function=\n>",
        "<tool_call>",
        "<tool_call>\n<func",
    ] {
        assert_eq!(read(QWEN, text), [content(text)]);
    }
    // Cut off.
    let text = "<tool_call>\n<function=weather>\n<parameter=city>\nKöl";
    assert_eq!(read(QWEN, text), [call("weather", "{\"city\":\"Köl")]);
    let text = "<tool_call>\n<function=weather>\n<parameter=days>\n2";
    assert_eq!(read(QWEN, text), [call("weather", "")]);
}

#[test]
fn glm() {
    let text = "\n<think>Hm.</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln\n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>";
    let expected = [
        reasoning("Hm."),
        content("I look."),
        call("weather", "{\"city\":\"Köln\\n\",\"days\":2}"),
        call("now", "{}"),
    ];
    assert_eq!(read(GLM, text), expected);
    let text = "<tool_call>weather<arg_key>city</arg_key><arg_value>A</arg_value></tool_call><tool_call>now</tool_call>";
    assert_eq!(read(GLM, text), [call("weather", "{\"city\":\"A\"}"), call("now", "{}")]);
    for text in
        ["A <tool_call> tag.", "<tool_call>two words\n</tool_call>", "<tool_call>now\nthen", "<tool_call>no"]
    {
        assert_eq!(read(GLM, text), [content(text)]);
    }
    // Reasoning is off, as the prompt says.
    let dialect = Dialect::of(GLM);
    assert_eq!(parts(&dialect, "<|assistant|>\n<think></think>", &tools(), "\nYes."), [content("Yes.")]);
}

#[test]
fn minimax() {
    let text = "Hm.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Köln</parameter>\n<parameter name=\"hours\">[1, 2]</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>";
    let dialect = Dialect::of(MINIMAX);
    let expected = [
        reasoning("Hm."),
        content("I look."),
        call("weather", "{\"city\":\"Köln\",\"hours\":[1, 2]}"),
        call("now", "{}"),
    ];
    assert_eq!(parts(&dialect, "]~b]ai\n<think>\n", &tools(), text), expected);
    let text = "<minimax:tool_call>no</minimax:tool_call>";
    assert_eq!(read(MINIMAX, text), [content(text)]);
}

#[test]
fn deepseek_dsml() {
    let text = "Hm.</think>I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Köln > Bonn</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n<｜DSML｜parameter name=\"hours\" string=\"false\">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>";
    let expected = [
        reasoning("Hm."),
        content("I look."),
        call("weather", r#"{"city":"Köln > Bonn","days":2,"hours":[1, 2]}"#),
        call("now", "{}"),
    ];
    assert_eq!(parts(&Dialect::of(DSML), "<｜Assistant｜><think>", &tools(), text), expected);
    // A parameter's own statement counts if its schema is open or missing.
    let parameter = |name: &str, says: &str, value: &str| {
        format!("<｜DSML｜parameter name=\"{name}\" string=\"{says}\">{value}</｜DSML｜parameter>\n")
    };
    let parameters = [
        parameter("either", "true", "5"),
        parameter("days", "true", "5"),
        parameter("other", "true", "5"),
        parameter("more", "false", "5"),
        parameter("units", "true", "null"),
        parameter("place", "false", "{\"x\": null}"),
    ];
    let text = format!(
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n{}</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        parameters.concat()
    );
    let arguments = r#"{"either":"5","days":5,"other":"5","more":5,"units":"null","place":{"x": null}}"#;
    assert_eq!(read(DSML, &text), [call("weather", arguments)]);
    // V4 differs in the tag around all calls.
    let text = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Köln</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    assert_eq!(read(DSML_V4, text), [call("weather", r#"{"city":"Köln"}"#)]);
    assert_eq!(read(DSML, text), [content(text)]);
    for text in ["The mark ｜DSML｜ is rare.", "<｜DSML｜function_calls>no</｜DSML｜function_calls>"] {
        assert_eq!(read(DSML, text), [content(text)]);
    }
}

#[test]
fn deepseek() {
    // With and without a code block.
    let text = "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Köln\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let expected = [content("I look."), call("weather", "{\"city\": \"Köln\"}"), call("now", "{}")];
    assert_eq!(read(DEEPSEEK, text), expected);
    let text = "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Köln\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    assert_eq!(read(DEEPSEEK, text), expected);
    // Calls end reasoning without an end tag.
    let dialect = Dialect::of(DEEPSEEK);
    let parts = parts(&dialect, "<｜Assistant｜><think>", &tools(), text);
    assert_eq!(parts[0], reasoning("I look."));
    assert_eq!(parts[1..], expected[1..]);
    for text in [
        "<｜tool▁calls▁begin｜>  no",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no",
        "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>function<｜tool▁sep｜>\n\n",
    ] {
        let parts = read(DEEPSEEK, text);
        assert!(matches!(&parts[..], [Part::Content(_)]) || parts == [call("function", "")], "{parts:?}");
    }
}

#[test]
fn kimi() {
    let text = "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"city\": \"Köln\"}<|tool_call_end|><|tool_call_begin|>functions.files.write:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    let expected = [content("I look."), call("weather", "{\"city\": \"Köln\"}"), call("files.write", "{}")];
    assert_eq!(read(KIMI, text), expected);
    let text = "<|tool_call_begin|> now <|tool_call_argument_begin|> <|tool_call_end|>.";
    assert_eq!(read(KIMI, text), [call("now", "{}"), content(".")]);
    let text = "<|tool_call_begin|>now:0<|tool_call_argument_begin|>a: b<|tool_call_end|>";
    assert_eq!(read(KIMI, text), [call("now", "a: b")]);
    let text = "<|tool_calls_section_begin|> none";
    assert_eq!(read(KIMI, text), [content(text)]);
}

#[test]
fn harmony() {
    let dialect = Dialect::of(HARMONY);
    let read = |text: &str| parts(&dialect, "…<|start|>assistant", &tools(), text);
    let weather = call("weather", "{\"city\": \"Köln\"}");
    let final_ = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is\n\"it\". ";
    assert_eq!(read(final_), [reasoning("Hm."), content("It is\n\"it\". ")]);
    assert_eq!(read(&format!("{final_}<|return|>")), [reasoning("Hm."), content("It is\n\"it\". ")]);
    // The recipient before or after the channel; the content type as words or as a tag.
    for head in [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.weather<|message|>",
        "<|channel|>commentary to=weather json<|message|>",
        " to=functions.weather<|channel|>commentary json<|message|>",
        " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>analysis to=functions.weather code<|message|>",
        "<|start|>assistant to=functions.weather<|channel|>commentary<|message|>",
    ] {
        for end in ["<|call|>", "", "\n<|end|>"] {
            let text = format!("{head}{{\"city\": \"Köln\"}}{end}");
            assert_eq!(read(&text), std::slice::from_ref(&weather), "{text}");
        }
        let text =
            format!("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{head}{{\"city\": \"Köln\"}}");
        assert_eq!(read(&text), [reasoning("Hm."), weather.clone()]);
    }
    // Text before a call; several calls; reasoning in two messages; a missing closing tag.
    let text = "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|><|call|><|start|>assistant<|channel|>commentary to=functions.weather<|message|>{\"city\": \"Köln\"}<|call|>";
    let expected = [reasoning("One.\n\nTwo."), content("I look."), call("now", "{}"), weather];
    assert_eq!(read(text), expected);
    // A prompt that has started the answer.
    let begun = "<|start|>assistant<|channel|>final<|message|>Well";
    assert_eq!(parts(&dialect, begun, &[], ", yes."), [content(", yes.")]);
    assert_eq!(
        parts(&dialect, "<|start|>assistant<|channel|>analysis<|message|>", &[], "Hm."),
        [reasoning("Hm.")]
    );
    // No headers.
    for text in ["Yes.", "to=x", " assistant", "assistance is near"] {
        assert_eq!(read(text), [content(text)]);
    }
    assert_eq!(read("<|channel|>fin"), []);
}

#[test]
fn llama() {
    let weather = call("weather", "{\"city\": \"Köln\"}");
    for text in [
        "{\"name\": \"weather\", \"parameters\": {\"city\": \"Köln\"}}",
        "<|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"Köln\"}}",
        " {\"type\": \"function\", \"parameters\": {\"city\": \"Köln\"}, \"name\": \"weather\"}\n",
    ] {
        assert_eq!(read(LLAMA, text), std::slice::from_ref(&weather), "{text}");
    }
    let text = "{\"name\": \"weather\", \"parameters\": {\"city\": \"Köln\"}}; {\"name\": \"now\", \"parameters\": {}}";
    assert_eq!(read(LLAMA, text), [weather, call("now", "{}")]);
    for text in [
        "{\"name\": \"Bob\", \"parameters\": {}}",
        "{\"name\": \"now\"}",
        "{\"name\": \"now\", \"age\": 3}",
        "A {\"name\": \"now\", \"parameters\": {}}",
        "<|python_tag|>print(1)",
        "{\"name\": \"now\", \"para",
    ] {
        assert_eq!(read(LLAMA, text), [content(text)], "{text}");
    }
}

#[test]
fn reasoning_is_separated_from_the_answer() {
    let dialect = Dialect::of(NONE);
    let read = |prompt: &str, text: &str| parts(&dialect, prompt, &[], text);
    assert_eq!(read("", "Hello, <b>you</b>."), [content("Hello, <b>you</b>.")]);
    assert_eq!(
        read("", "<think>\nOne, two.\n</think>\n\nThree.\n"),
        [reasoning("One, two."), content("Three.\n")]
    );
    assert_eq!(read("…<think>\n", "One </thin\n</think>Two"), [reasoning("One </thin"), content("Two")]);
    assert_eq!(read("…<think>\n", "<think>One</think>Two"), [reasoning("One"), content("Two")]);
    let text = "\n\nA < b, and <think> is a tag.</think>";
    assert_eq!(read("", text), [content(text)]);
    assert_eq!(read("", "<think>It never ends <"), [reasoning("It never ends <")]);
    assert_eq!(read("", "<thi"), [content("<thi")]);
    assert_eq!(read("", "<think></think>Ähm."), [content("Ähm.")]);
    assert_eq!(read("<think>", ""), []);
}

#[test]
fn a_call_ends_reasoning_without_an_end_tag() {
    let weather = |arguments| call("weather", arguments);
    for (template, opened, text, arguments) in [
        (
            HERMES,
            "<tool_call>\n",
            "{\"name\": \"weather\", \"arguments\": {\"days\": 2}}\n</tool_call>",
            "{\"days\": 2}",
        ),
        (
            QWEN,
            "<tool_call>\n",
            "<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            "{\"days\":2}",
        ),
        (
            QWEN,
            "",
            "<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            "{\"days\":2}",
        ),
        (
            GLM,
            "<tool_call>",
            "weather\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
            "{\"days\":2}",
        ),
        (
            DSML_V4,
            "<｜DSML｜tool_calls>\n",
            "<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            "{\"days\":2}",
        ),
    ] {
        let dialect = Dialect::of(template);
        let read = |prompt: &str, text: &str| parts(&dialect, prompt, &tools(), text);
        let one = format!("{opened}{text}");
        // The prompt opened the reasoning, or the model did.
        let expected = [reasoning("I look."), weather(arguments)];
        assert_eq!(read("<think>\n", &format!("I look.\n\n{one}\n")), expected);
        assert_eq!(read("", &format!("<think>\nI look.\n{one}")), expected);
        assert_eq!(read("<think>", &one), expected[1..]);
        // A later tag that ends the reasoning is dropped, and text after it is content.
        let twice = format!("I look.\n{one}\n{one}\n</think>\n\nDone.</think>");
        let expected =
            [expected[0].clone(), weather(arguments), weather(arguments), content("Done.</think>")];
        assert_eq!(read("<think>\n", &twice), expected);
        // Reasoning that mentions a tag does not end there.
        if !opened.is_empty() {
            let tag = opened.trim_end();
            let text = format!("I could write {tag} now, {tag}{tag}.\n</think>\n\nNo.");
            let mentioned = format!("I could write {tag} now, {tag}{tag}.");
            assert_eq!(read("<think>\n", &text), [reasoning(&mentioned), content("No.")]);
            assert_eq!(read("<think>\n", &format!("I write {tag}")), [reasoning(&format!("I write {tag}"))]);
        }
        // Without tools there are no calls.
        let text = format!("I look.\n{one}");
        assert_eq!(parts(&dialect, "<think>\n", &[], &text), [reasoning(&text)]);
    }
}

#[test]
fn without_tools_or_a_format_calls_are_text() {
    let text = "a <tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>\n";
    assert_eq!(parts(&Dialect::of(HERMES), "", &[], text), [content(text)]);
    assert_eq!(parts(&Dialect::of(NONE), "", &tools(), text), [content(text)]);
}

#[test]
fn long_texts_take_time_in_proportion() {
    let start = std::time::Instant::now();
    let word = "word < word \n\n";
    let many = word.repeat((1 << 20) / word.len());
    let spaces = " ".repeat(1 << 20);
    let escaped = serde_json::to_string(&many).unwrap();
    let texts = [
        (NONE, many.clone()),
        (HERMES, many.clone()),
        (HERMES, spaces.clone()),
        (HERMES, format!("<tool_call>{spaces}")),
        (
            HERMES,
            format!("<tool_call>{{\"name\": \"now\", \"arguments\": {{\"a\": {escaped}}}}}</tool_call>"),
        ),
        (HERMES, "<tool_call>{\"x\":[\"".repeat(1 << 15)),
        (
            QWEN,
            format!(
                "<tool_call><function=files.write><parameter=text>{many}</parameter></function></tool_call>"
            ),
        ),
        (
            QWEN,
            format!(
                "<tool_call><function=weather><parameter=place>{many}</parameter></function></tool_call>"
            ),
        ),
        (
            QWEN,
            format!(
                "<tool_call><function=weather><parameter=units>{spaces}</parameter></function></tool_call>"
            ),
        ),
        (QWEN, format!("<tool_call><function=weather>{}", "<parameter=".repeat(1 << 16))),
        (QWEN, "<tool_call><function=".repeat(1 << 15)),
        (GLM, "<tool_call>now\n".repeat(1 << 15)),
        (
            KIMI,
            format!(
                "<|tool_call_begin|>now:0<|tool_call_argument_begin|>{{\"a\": {escaped}}}<|tool_call_end|>"
            ),
        ),
        (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>".repeat(1 << 14)),
        (HARMONY, format!("<|channel|>final<|message|>{many}")),
        (HARMONY, "<|channel|>".repeat(1 << 16)),
        (LLAMA, format!("{{\"a\": {escaped}")),
        (PYTHONIC, format!("[now(a={escaped})]")),
        (PYTHONIC, format!("[now(a={many})]")),
        (PYTHONIC, format!("[{spaces}")),
        (MISTRAL, "[TOOL_CALLS]".repeat(1 << 15)),
        (MISTRAL, "[TOOL_CALLS]now[CALL_ID]".repeat(1 << 15)),
        (MISTRAL_JSON, "[TOOL_CALLS][{\"x\":[\"".repeat(1 << 15)),
        (MINICPM, format!("<function name=\"files.write\"><param name=\"text\"><![CDATA[{many}")),
        (SOLAR, "<|begin|>assistant<|tool_call:begin|>".repeat(1 << 14)),
        (GIGACHAT3, "function call<|role_sep|>".repeat(1 << 15)),
        (HERMES, format!("<think>{}", "<tool_call>{\"x\":[\"".repeat(1 << 15))),
        (HY3_PREVIEW, "<tool_call>now<tool_se".repeat(1 << 15)),
        (GEMMA4, format!("<|tool_call>call:files.write{{text:<|\"|>{many}<|\"|>}}<tool_call|>")),
        (GEMMA4, format!("<|tool_call>call:now{{a:{many}")),
        (GEMMA4, format!("<|tool_call>call:now{{a:{}", "[{b:".repeat(1 << 15))),
        (GEMMA4, "<|channel>thought<channel|>".repeat(1 << 15)),
        (COHERE, "<|START_ACTION|>[{\"x\":[\"".repeat(1 << 15)),
        (LFM2, format!("<|tool_call_start|>[now(a={escaped})]")),
        (LFM2, format!("<|tool_call_start|>[now(a='{}", "' ' ".repeat(1 << 18))),
        (LFM2, "<|tool_call_start|>[now(1".repeat(1 << 15)),
        (ERNIE, format!("<response>{many}")),
    ];
    for (template, text) in &texts {
        let dialect = Dialect::of(template);
        let whole = parse(dialect.parser("", &tools()), [text.as_str()]);
        let cut = parse(dialect.parser("", &tools()), characters(text));
        assert!(cut == whole, "{}…", &text[..40.min(text.len())]);
    }
    // Quadratic time would take hours.
    assert!(start.elapsed().as_secs() < 600, "{:?}", start.elapsed());
}

/// Compares with published templates, whose vectors `tools/dialect_vectors.py` makes.
#[test]
fn answers_of_published_templates_are_parsed() {
    let Some(path) = vectors("FOREBAY_DIALECT_VECTORS", "dialect_vectors.py") else { return };
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let tools = file["tools"].as_array().unwrap();
    for template in file["templates"].as_array().unwrap() {
        let dialect = Dialect::of(template["source"].as_str().unwrap());
        eprintln!("{}: {}", template["template"].as_str().unwrap(), dialect.name());
        if dialect.name() == "none" {
            continue;
        }
        for vector in template["vectors"].as_array().unwrap() {
            let text = |key: &str| vector[key].as_str().unwrap();
            let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
            for part in parts(&dialect, text("prompt"), tools, text("text")) {
                match part {
                    Part::Reasoning(text) => reasoning += &text,
                    Part::Content(text) => content += &text,
                    Part::Call(name, arguments) => {
                        let arguments: Value = serde_json::from_str(&arguments).unwrap();
                        calls.push(json!({ "name": name, "arguments": arguments }));
                    }
                }
            }
            let name = format!("{}, {}: {}", template["template"], vector["name"], text("text"));
            assert_eq!(reasoning, text("reasoning"), "{name}");
            assert_eq!(content, text("content"), "{name}");
            assert_eq!(Value::from(calls), vector["calls"], "{name}");
        }
    }
}

/// Texts of tags and of what occurs between them.
fn tagged() -> impl Strategy<Value = String> {
    let words = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"now\", \"arguments\": ",
        "{\"a\": 1}",
        "}",
        "<function=",
        "weather",
        "now",
        ">",
        "</function>",
        "<parameter=",
        "city",
        "days",
        "</parameter>",
        "\n",
        " ",
        "<",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<invoke name=\"",
        "\">",
        "</invoke>",
        "<parameter name=\"",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "```json\n",
        "\n```",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "functions.now:0",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "analysis",
        "final",
        "commentary",
        " to=functions.now",
        "<|constrain|>",
        "json",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
        "<|python_tag|>",
        "<|python_start|>",
        "[now(",
        "city=",
        "'",
        ")",
        "{",
        ",",
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "<tool_calls>",
        "</tool_calls>",
        "<function name=\"",
        "<param name=\"",
        "<![CDATA[",
        "]]>",
        "</param>",
        "<|message_sep|>",
        "function call<|role_sep|>",
        "<|function_call|>",
        "<|begin|>assistant",
        "<|think|>",
        "<|content|>",
        "<|tool_calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
        "<|calls|>",
        "<|tool_call>",
        "<tool_call|>",
        "call:now{",
        "city:",
        "<|\"|>",
        "<|channel>thought",
        "<channel|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "\"tool_name\": \"now\"",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
        "<|tool_call|>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<tool_sep>",
        "<tool_call:opensource>",
        "<tool_sep:opensource>",
        "<arg_key:opensource>",
        "</arg_key:opensource>",
        "<arg_value:opensource>",
        "</arg_value:opensource>",
        "</tool_calls:opensource>",
        "<response>",
        "</response>",
        "助手：",
        "</answer>",
        "<|python_end|>",
        ";",
        "\"",
        "\\",
        "é",
        "null",
        "[",
        "]",
    ];
    let word = prop_oneof![4 => prop::sample::select(words.to_vec()).prop_map(String::from), 1 => ".{0,3}"];
    prop::collection::vec(word, 0..24).prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_text_cut_anywhere_gives_the_same_pieces(
        text in prop_oneof![tagged(), any::<String>()],
        which in 0..ALL.len(),
        opened in any::<bool>(),
        sizes in prop::collection::vec(1usize..12, 1..8),
    ) {
        let dialect = Dialect::of(ALL[which]);
        let parser = || dialect.parser(if opened { "<think>\n" } else { "<|start|>assistant" }, &tools());
        let whole = parse(parser(), [text.as_str()]);
        prop_assert_eq!(&parse(parser(), characters(&text)), &whole);
        let mut pieces = Vec::new();
        let mut rest = text.as_str();
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, after) = rest.split_at(rest.ceil_char_boundary(*size));
            pieces.push(piece);
            rest = after;
        }
        prop_assert_eq!(parse(parser(), pieces), whole);
    }

    #[test]
    fn content_without_tags_passes_unchanged(text in "[^<{]*", which in 0..ALL.len()) {
        let parts = parse(Dialect::of(ALL[which]).parser("", &tools()), characters(&text));
        let expected = if text.is_empty() { vec![] } else { vec![content(&text)] };
        prop_assert_eq!(parts, expected);
    }
}
