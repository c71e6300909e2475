//! Templates that show the tags of each dialect, and answers assembled from parsed pieces.

use forebay_engine::chat::dialect::{Dialect, Parser, Piece};
use serde_json::{Value, json};

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    Reasoning(String),
    Content(String),
    Call(String, String),
}

pub fn reasoning(text: &str) -> Part {
    Part::Reasoning(text.into())
}

pub fn content(text: &str) -> Part {
    Part::Content(text.into())
}

pub fn call(name: &str, arguments: &str) -> Part {
    Part::Call(name.into(), arguments.into())
}

/// Joins pieces, as a client does.
#[derive(Default)]
struct Parts(Vec<Part>);

impl Parts {
    fn take(&mut self, piece: Piece<'_>) {
        match (piece, self.0.last_mut()) {
            (Piece::Reasoning("") | Piece::Content("") | Piece::Arguments(""), _) => panic!("an empty piece"),
            (Piece::Reasoning(text), Some(Part::Reasoning(all))) => all.push_str(text),
            (Piece::Reasoning(text), _) => self.0.push(reasoning(text)),
            (Piece::Content(text), Some(Part::Content(all))) => all.push_str(text),
            (Piece::Content(text), _) => self.0.push(content(text)),
            (Piece::Call { name }, _) => self.0.push(call(name, "")),
            (Piece::Arguments(text), Some(Part::Call(_, all))) => all.push_str(text),
            (Piece::Arguments(text), _) => panic!("arguments of no call: {text}"),
        }
    }
}

pub fn parse<'a>(parser: Parser, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Part> {
    let mut parts = Parts::default();
    let mut parser = parser;
    pieces.into_iter().for_each(|piece| parser.push(piece, &mut |piece| parts.take(piece)));
    parser.finish(&mut |piece| parts.take(piece));
    parts.0
}

/// The characters of a text.
pub fn characters(text: &str) -> impl Iterator<Item = &str> {
    text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()])
}

/// The parts of a text. Asserts that they are the same when the text is cut in two at any place, and when it comes
/// character by character.
pub fn parts(dialect: &Dialect, prompt: &str, tools: &[Value], text: &str) -> Vec<Part> {
    let parser = || dialect.parser(prompt, tools);
    let whole = parse(parser(), [text]);
    assert_eq!(parse(parser(), characters(text)), whole, "in characters: {text}");
    for at in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
        let (a, b) = text.split_at(at);
        assert_eq!(parse(parser(), [a, b]), whole, "cut after {a:?}: {text}");
    }
    whole
}

pub fn tools() -> Vec<Value> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": { "type": "string" },
            "days": { "type": "integer" },
            "wind": { "type": "number" },
            "hourly": { "type": "boolean" },
            "units": { "type": ["string", "null"] },
            "place": { "type": "object" },
            "hours": { "type": "array", "items": { "type": "integer" } },
            "limit": { "anyOf": [{ "type": "integer" }, { "type": "null" }] },
            "mode": { "$ref": "#/$defs/mode" },
            "level": { "enum": [1, 2, 3] },
            "either": { "type": ["string", "integer"] },
            "nothing": { "type": "null" },
        },
        "$defs": { "mode": { "enum": ["a", "b"] } },
    });
    vec![
        json!({ "type": "function", "function": { "name": "weather", "parameters": weather } }),
        json!({ "type": "function", "function": { "name": "now" } }),
        json!({ "name": "files.write", "parameters": { "type": "object", "properties": {
            "path": { "type": "string" }, "text": { "type": "string" } } } }),
    ]
}

/// The parts of a text in the template's dialect, with tools.
pub fn read(template: &str, text: &str) -> Vec<Part> {
    parts(&Dialect::of(template), "", &tools(), text)
}

/// Templates that only show how calls are written.
pub const HERMES: &str = "<tool_call>\n{\"name\": name, \"arguments\": …}\n</tool_call>";
pub const APRIEL: &str = "<tool_calls>[{\"name\": name, \"arguments\": …}]</tool_calls>";
pub const QWEN: &str = "<tool_call>\n<function=name>\n<parameter=key>";
pub const GLM: &str = "<tool_call>{name}\n<arg_key>{key}</arg_key>";
pub const MINIMAX: &str = "<minimax:tool_call><invoke name=\"\">";
pub const DSML: &str = "<｜DSML｜function_calls><｜DSML｜invoke name=\"\">";
pub const DSML_V4: &str = "'｜DSML｜' '<' ~ dsml ~ 'tool_calls>' '<' ~ dsml ~ 'invoke name='";
pub const DEEPSEEK: &str = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>";
pub const KIMI: &str = "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>";
pub const HARMONY: &str = "<|start|>assistant<|channel|>final<|message|>";
pub const LLAMA: &str = "<|start_header_id|>{\"name\": name, \"parameters\": …} message.tool_calls";
pub const MINICPM: &str = "<function name=\"name\"><param name=\"key\"><![CDATA[value]]></param></function>";
pub const MISTRAL: &str = "[TOOL_CALLS]name[ARGS]{}";
pub const MISTRAL_ID: &str = "[TOOL_CALLS]name[CALL_ID]123456789[ARGS]{}";
pub const MISTRAL_JSON: &str = "[TOOL_CALLS][{}]";
pub const SOLAR: &str =
    "<|begin|>assistant<|tool_calls|><|tool_call:begin|>id<|tool_call:name|>name<|tool_call:args|>";
pub const GIGACHAT3: &str = "function call<|role_sep|>\n{}<|message_sep|>\n\n";
pub const GIGACHAT31: &str = "assistant<|role_sep|>\n<|function_call|>{}<|message_sep|>\n\n";
pub const HY3: &str = "HYTK = ':opensource' '<tool_calls{}>' '<tool_call{}>' '<tool_sep{}>' '<arg_key{}>'";
pub const HY3_PREVIEW: &str = "<tool_calls>\n<tool_call>{name}<tool_sep>\n<arg_key>{key}</arg_key>";
pub const GEMMA4: &str = "<|tool_call>call:name{key:<|\"|>value<|\"|>}<tool_call|>";
pub const COHERE: &str = "<|START_TEXT|><|START_ACTION|>[{\"tool_name\": …}]<|END_ACTION|>";
pub const COHERE_RESPONSE: &str = "<|START_RESPONSE|><|START_ACTION|>[{\"tool_name\": …}]<|END_ACTION|>";
pub const GRANITE: &str = "<|start_of_role|>assistant<|end_of_role|><|tool_call|> <response></response>";
pub const ERNIE: &str = "<global_setting><response>\n</response>\n<tool_call>\n</tool_call>";
pub const HUNYUAN: &str =
    "<|extra_4|><|extra_0|><tool_calls>[{\"name\": name, \"arguments\": …}]</tool_calls>";
pub const LFM2: &str = "<|im_start|><|tool_call_start|>[]<|tool_call_end|>";
pub const LLAMA4: &str = "<|header_start|>{\"name\": name, \"parameters\": …} message.tool_calls";
pub const PYTHONIC: &str = "<|start_header_id|>[func_name1(params_name1=params_value1)]";
pub const NONE: &str = "<|im_start|>{{ message.content }}<|im_end|>";
pub const ALL: [&str; 30] = [
    HERMES,
    APRIEL,
    QWEN,
    GLM,
    MINIMAX,
    DSML,
    DSML_V4,
    DEEPSEEK,
    KIMI,
    HARMONY,
    LLAMA,
    MINICPM,
    MISTRAL,
    MISTRAL_ID,
    MISTRAL_JSON,
    SOLAR,
    GIGACHAT3,
    GIGACHAT31,
    PYTHONIC,
    HY3,
    HY3_PREVIEW,
    GEMMA4,
    COHERE,
    COHERE_RESPONSE,
    GRANITE,
    ERNIE,
    HUNYUAN,
    LFM2,
    LLAMA4,
    NONE,
];
