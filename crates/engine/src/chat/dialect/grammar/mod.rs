//! Grammars for answers that must call a tool, or must be JSON, in a model's own format.
//!
//! They are Lark grammars as llguidance reads them: `<[number]>` is a control token, `%json {…}` a schema.

mod gemma;

use serde_json::{Value, json};

use super::sections::Naming;
use super::values::{Kinds, Reading, Tools, name, parameters, quoted};
use super::xml::Layout;
use super::{Dialect, Format, harmony, sections, xml};
use crate::error::{Error, Result};

/// White space between the parts of JSON: nothing, a space, or a line break with indentation. Models write JSON in
/// one of these ways, and the bounds keep a weak model from writing white space for ever.
pub(crate) const WHITESPACE: &str = r"\x20|\n(\x20{0,32}|\t{0,8})";

/// A grammar for an answer that calls one of the tools.
pub(super) fn calls(dialect: &Dialect, prompt: &str, tools: &[Value]) -> Result<String> {
    if tools.iter().all(|tool| name(tool).is_none()) {
        return Err(Error::Invalid("the request requires a tool call, but has no tools".into()));
    }
    if dialect.format == Format::None {
        return Err(Error::Unsupported(
            "the model's chat template does not show how it calls tools, so a call cannot be required; let the model choose, or \
             use a model that was trained with tools"
                .into(),
        ));
    }
    let mut grammar = Grammar::new(dialect);
    let start = grammar.before_answer(prompt, tools);
    let calls = grammar.calls(tools).join(" | ");
    Ok(grammar.finish(&format!("{start} ({calls})")))
}

/// A grammar for an answer without calls; `None` if calls cannot be told from text.
pub(super) fn text(dialect: &Dialect, prompt: &str) -> Option<String> {
    let mut grammar = Grammar::new(dialect);
    let start = grammar.before_answer(prompt, &[]);
    let text = match dialect.format {
        Format::Harmony => grammar.rule(ANY),
        format if format.opening().is_empty() => return None,
        format => grammar.text_without(format.opening()),
    };
    let [before, after] = grammar.around_answer(prompt);
    Some(grammar.finish(&format!("{start} {before} {text} {after}")))
}

/// A grammar for an answer that is JSON or, if there are tools, a call of one of them.
pub(super) fn answer(dialect: &Dialect, prompt: &str, schema: &Value, tools: &[Value]) -> String {
    let mut grammar = Grammar::new(dialect);
    let start = grammar.before_answer(prompt, tools);
    let [before, after] = grammar.around_answer(prompt);
    let json = grammar.json(schema);
    let mut answers = vec![format!("{before} {json} {after}")];
    // If the template does not show how to call, there are no calls.
    if dialect.format != Format::None {
        answers.extend(grammar.calls(tools));
    }
    let answers = match &answers[..] {
        [json] => json.clone(),
        several => format!("({})", several.join(" | ")),
    };
    grammar.finish(&format!("{start} {answers}"))
}

/// Any text.
const ANY: &str = r"/(.|\n)*/";

/// A grammar under construction.
struct Grammar<'a> {
    dialect: &'a Dialect,
    rules: String,
    count: usize,
}

impl<'a> Grammar<'a> {
    fn new(dialect: &'a Dialect) -> Grammar<'a> {
        Grammar { dialect, rules: String::new(), count: 0 }
    }

    fn finish(self, start: &str) -> String {
        format!("start: {}\n{}", start.trim(), self.rules)
    }

    /// Adds a rule and returns its name.
    fn rule(&mut self, body: &str) -> String {
        self.rule_with("", body)
    }

    fn rule_with(&mut self, options: &str, body: &str) -> String {
        let name = format!("r{}", self.count);
        self.count += 1;
        self.rules.push_str(&format!("{name}{options}: {body}\n"));
        name
    }

    /// JSON that matches a schema.
    fn json(&mut self, schema: &Value) -> String {
        let mut schema = match schema {
            Value::Object(_) => schema.clone(),
            _ => json!({}),
        };
        schema["x-guidance"] = json!({ "whitespace_pattern": WHITESPACE });
        self.rule(&format!("%json {schema}"))
    }

    /// A tag: a control token, or its text.
    fn tag(&self, tag: &str) -> String {
        let control = |tag: &str| {
            let (_, token) = self.dialect.controls.iter().find(|(text, _)| *text == tag)?;
            Some(format!("<[{}]>", token.0))
        };
        let alone = tag.trim_end();
        let with_lines = || Some(format!("{} {}", control(alone)?, quoted(&tag[alone.len()..])));
        let with_channel = || {
            let [channel, _] = super::gemma::CHANNEL;
            Some(format!("{} {}", control(channel)?, quoted(tag.strip_prefix(channel)?)))
        };
        control(tag).or_else(with_lines).or_else(with_channel).unwrap_or_else(|| quoted(tag))
    }

    /// Tags and text in sequence.
    fn tags(&self, tags: &[&str]) -> String {
        tags.iter().map(|tag| self.tag(tag)).collect::<Vec<_>>().join(" ")
    }

    /// Any text up to a tag, and the tag.
    fn until(&mut self, tag: &str) -> String {
        self.text_until(ANY, tag)
    }

    /// Text that matches a pattern up to a tag, and the tag.
    fn text_until(&mut self, text: &str, tag: &str) -> String {
        match self.tag(tag) {
            token if token.starts_with('<') => {
                let text = self.rule(text);
                format!("{text} {token}")
            }
            end => self.rule_with(&format!("[suffix={end}]"), text),
        }
    }

    /// Any text without these tags. Text never contains tags that are control tokens.
    fn text_without(&mut self, tags: &[&str]) -> String {
        if tags.is_empty() {
            return ANY.into();
        }
        let tags: Vec<String> = tags.iter().map(|tag| quoted(tag)).collect();
        // Lark allows negation only for terminals.
        let name = format!("TEXT{}", self.count);
        self.count += 1;
        self.rules.push_str(&format!("{name}: {ANY} & ~({ANY} ({}) {ANY})\n", tags.join(" | ")));
        name
    }

    /// Reasoning and the tag that ends it. With tools, a call would end the reasoning too, and it would escape the
    /// grammar: so this reasoning contains no calls.
    fn reasoning(&mut self, tools: &[Value]) -> String {
        let calls = if tools.is_empty() { &[] } else { self.dialect.format.opening() };
        let text = self.text_without(calls);
        self.text_until(&text, self.dialect.think.close)
    }

    /// What is before and after an answer without calls.
    fn around_answer(&mut self, prompt: &str) -> [String; 2] {
        match self.dialect.format {
            Format::Harmony if !harmony::is_in_message(prompt) => {
                [self.tags(&["<|channel|>", "final", "<|message|>"]), String::new()]
            }
            Format::Json(json) => match json.answer {
                Some([before, after]) => [self.tag(before), format!("{}?", self.tag(after))],
                None => [String::new(), String::new()],
            },
            format if format == Format::Sections(&sections::SOLAR) => {
                [self.tag("<|content|>"), String::new()]
            }
            _ => [String::new(), String::new()],
        }
    }

    /// What precedes an answer: reasoning, if the model reasons and the prompt does not decide it.
    fn before_answer(&mut self, prompt: &str, tools: &[Value]) -> String {
        let prompt = prompt.trim_end();
        if self.dialect.format == Format::Harmony {
            if harmony::is_in_message(prompt) {
                return String::new();
            }
            let end = self.until("<|end|>");
            let [channel, message, start] =
                ["<|channel|>", "<|message|>", "<|start|>"].map(|tag| self.tag(tag));
            let reasoning =
                self.rule(&format!(r#"{channel} "analysis" {message} {end} {start} "assistant""#));
            return format!("{reasoning}?");
        }
        const LINES: &str = r"/\n{0,2}/";
        let think = self.dialect.think;
        if self.dialect.format == Format::Sections(&sections::SOLAR) {
            if !self.dialect.thinks {
                return String::new();
            }
            let reasoning = self.reasoning(tools);
            let [think, begin] = [think.open, sections::SOLAR_BEGIN].map(|tag| self.tag(tag));
            let reasoning = self.rule(&format!("{think} {reasoning} {begin} \"assistant\""));
            format!("{reasoning}?")
        } else if prompt.ends_with(think.open) {
            let reasoning = self.reasoning(tools);
            format!("{reasoning} {LINES}")
        } else if self.dialect.thinks && !prompt.ends_with(think.close) {
            let reasoning = self.reasoning(tools);
            let think = self.tag(think.open);
            let reasoning = self.rule(&format!("{think} {reasoning}"));
            format!("{LINES} {reasoning}? {LINES}")
        } else if prompt.ends_with(think.close) {
            LINES.into()
        } else {
            String::new()
        }
    }

    /// The rule of each tool's call.
    fn calls(&mut self, tools: &[Value]) -> Vec<String> {
        let kinds = Tools::new(tools);
        let named = tools.iter().filter_map(|tool| Some((name(tool)?, parameters(tool))));
        named
            .map(|(name, schema)| {
                let call = self.call(name, schema, &kinds);
                self.rule(&call)
            })
            .collect()
    }

    /// A call of one tool.
    fn call(&mut self, name: &str, schema: &Value, tools: &Tools) -> String {
        match self.dialect.format {
            Format::None => String::new(),
            Format::Json(tags) => {
                let [before, after] = tags.around.map(|tags| self.tags(tags));
                let object = self.object(tags.object, name, schema);
                format!("{before} {object} {after}")
            }
            Format::Pythonic(tags) => {
                let list = self.pythonic(name, schema);
                // A list that is the whole answer needs no tags.
                match tags.begins {
                    [] => list,
                    _ => format!("{} {list} {}", self.tag(tags.around[0]), self.tag(tags.around[1])),
                }
            }
            Format::Gemma => self.gemma_call(name, schema),
            Format::Llama => self.object(["{\"name\": ", ", \"parameters\": "], name, schema),
            Format::Harmony => {
                let [channel, constrain, message] =
                    ["<|channel|>", "<|constrain|>", "<|message|>"].map(|tag| self.tag(tag));
                let arguments = self.arguments(schema);
                let to = quoted(&format!("commentary to=functions.{name} "));
                format!("{channel} {to} {constrain} \"json\" {message} {arguments}")
            }
            Format::Sections(tags) => self.section(tags, name, schema),
            Format::Xml(tags) => self.xml(tags, name, schema, tools),
        }
    }

    /// The arguments as a JSON object.
    fn arguments(&mut self, schema: &Value) -> String {
        match schema {
            Value::Object(fields) => {
                let mut schema = fields.clone();
                schema.insert("type".into(), "object".into());
                // Parameters that are not in the schema help nobody.
                if schema.contains_key("properties") && !schema.contains_key("additionalProperties") {
                    schema.insert("additionalProperties".into(), false.into());
                }
                self.json(&schema.into())
            }
            _ => quoted("{}"),
        }
    }

    /// A JSON object with a name and arguments, which have this text before them.
    fn object(&mut self, before: [&str; 2], name: &str, schema: &Value) -> String {
        let arguments = self.arguments(schema);
        let before = quoted(&format!("{}{}{}", before[0], quoted(name), before[1]));
        format!("{before} {arguments} \"}}\"")
    }

    /// A Python list with one call. Its values are JSON, which the parser accepts as Python.
    fn pythonic(&mut self, name: &str, schema: &Value) -> String {
        let arguments = self.items(schema, ", ", ")]", |grammar, name, property| {
            let value = grammar.json(&with_definitions(property, schema));
            format!("{} {value}", quoted(&format!("{name}=")))
        });
        format!("{} {arguments}", quoted(&format!("[{name}(")))
    }

    /// The properties of a schema as items with a separator, and the text after them. The items that the schema
    /// requires come first.
    fn items(
        &mut self,
        schema: &Value,
        separator: &str,
        end: &str,
        mut item: impl FnMut(&mut Self, &str, &Value) -> String,
    ) -> String {
        let required = schema.get("required").and_then(Value::as_array);
        let is_needed = |name: &str| required.is_some_and(|names| names.iter().any(|needed| needed == name));
        let properties = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
        let (needed, optional): (Vec<_>, Vec<_>) = properties.partition(|(name, _)| is_needed(name));
        let mut rule = |(name, property): (&String, &Value)| {
            let body = item(self, name, property);
            self.rule(&body)
        };
        let needed: Vec<String> = needed.into_iter().map(&mut rule).collect();
        let optional: Vec<String> = optional.into_iter().map(&mut rule).collect();
        let separator = quoted(separator);
        // What may follow each item, the last item first.
        let mut following = quoted(end);
        let mut firsts = vec![following.clone()];
        for item in optional.into_iter().rev() {
            firsts.push(format!("{item} {following}"));
            following = self.rule(&format!("({separator} {item})? {following}"));
        }
        if needed.is_empty() {
            format!("({})", firsts.join(" | "))
        } else {
            format!("{} {following}", needed.join(&format!(" {separator} ")))
        }
    }

    fn section(&mut self, tags: &sections::Tags, name: &str, schema: &Value) -> String {
        let arguments = self.arguments(schema);
        let [call, separator] = [tags.call, tags.separator].map(|tag| self.tag(tag));
        let call_end = tags.call_end.map(|tag| self.tag(tag)).unwrap_or_default();
        let [section, section_end] =
            tags.section.map(|section| section.map(|tag| self.tag(tag))).unwrap_or_default();
        let (before, after, end) = match tags.naming {
            Naming::BeforeId(tag) if self.dialect.numbered => {
                (format!("{} {} /[a-zA-Z0-9]{{9}}/", quoted(name), self.tag(tag)), String::new(), "")
            }
            Naming::BeforeId(_) => (quoted(name), String::new(), ""),
            Naming::AfterId(tag) => {
                (format!("/[a-z0-9]{{10}}/ {} {}", self.tag(tag), quoted(name)), String::new(), "")
            }
            Naming::Numbered => {
                (format!("{} /[0-9]{{1,3}}/", quoted(&format!("functions.{name}:"))), String::new(), "")
            }
            Naming::BeforeOrAfter if self.dialect.fenced => {
                (quoted("function"), quoted(&format!("{name}\n```json\n")), "\"\\n```\"")
            }
            Naming::BeforeOrAfter => (quoted(name), String::new(), ""),
        };
        format!("{section} {call} {before} {separator} {after} {arguments} {end} {call_end} {section_end}")
    }

    fn xml(&mut self, tags: &xml::Tags, name: &str, schema: &Value, tools: &Tools) -> String {
        let [key, key_end] = tags.key.map(|tag| self.tag(tag));
        let [open, close] = tags.calls.map(|calls| calls.map(|tag| self.tag(tag))).unwrap_or_default();
        let line = if tags.layout == Layout::Nothing { "" } else { "\n" };
        let end_of_line = if line.is_empty() { String::new() } else { quoted(line) };
        let quote = if tags.quotes { "\"" } else { "" };
        let mut call = match &tags.function {
            Some(function) => {
                let [before, after] = [function.open, function.name_end].map(|tag| self.tag(tag));
                let name = quoted(&format!("{quote}{name}{quote}"));
                format!("{open} {end_of_line} {before} {name} {after} {end_of_line}")
            }
            None => format!("{open} {}", quoted(&format!("{name}{line}"))),
        };
        let properties = schema.get("properties").and_then(Value::as_object);
        let required = schema.get("required").and_then(Value::as_array);
        for (parameter, property) in properties.into_iter().flatten() {
            let kinds = tools.kinds(name, parameter);
            let says = match (tags.says_text, kinds.may_be_text()) {
                (false, _) => "",
                (true, true) => " string=\"true\"",
                (true, false) => " string=\"false\"",
            };
            let before = quoted(&format!("{quote}{parameter}{quote}{says}"));
            let between = match tags.value {
                Some(tag) => format!("\"\\n\" {}", self.tag(tag)),
                None => String::new(),
            };
            let lines = if tags.layout == Layout::TagsAndValues { "\"\\n\"" } else { "" };
            let value = self.value(tags, property, schema, kinds);
            let body = format!("{key} {before} {key_end} {between} {lines} {value} {end_of_line}");
            let rule = self.rule(&body);
            let needed = required.is_some_and(|names| names.iter().any(|name| name == parameter));
            call.push_str(&format!(" {rule}{}", if needed { "" } else { "?" }));
        }
        match &tags.function {
            Some(function) => format!("{call} {} {end_of_line} {close}", self.tag(function.close)),
            None => format!("{call} {close}"),
        }
    }

    /// A value and the tag that ends it.
    fn value(&mut self, tags: &xml::Tags, property: &Value, root: &Value, kinds: Kinds) -> String {
        let end = self.tag(tags.value_end);
        let line = if tags.layout == Layout::TagsAndValues { "\"\\n\"" } else { "" };
        if let Some(values) = property.get("enum").and_then(Value::as_array) {
            let texts: Vec<String> = values
                .iter()
                .map(|v| quoted(&v.as_str().map_or_else(|| v.to_string(), str::to_owned)))
                .collect();
            if !texts.is_empty() {
                return format!("({}) {line} {end}", texts.join(" | "));
            }
        }
        if kinds.reading() != Reading::Whole || kinds.may_be_text() {
            if tags.sections {
                let [open, close] = xml::SECTION;
                let section = self.until(close);
                return format!("(/[^<]*/ | {} {section}) {end}", quoted(open));
            }
            return self.until(tags.value_end);
        }
        let json = self.json(&with_definitions(property, root));
        format!("{json} {line} {end}")
    }
}

/// The schema of a parameter, with the definitions that it refers to, which are in the schema of all parameters.
fn with_definitions(property: &Value, root: &Value) -> Value {
    let mut schema = property.clone();
    let refers = property.to_string().contains("\"$ref\"");
    for key in ["$defs", "definitions"].into_iter().filter(|_| refers) {
        if let (Some(definitions), Some(schema)) = (root.get(key), schema.as_object_mut()) {
            schema.insert(key.into(), definitions.clone());
        }
    }
    schema
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::tokenizer::{Bos, EncodeOptions};
    use crate::{Engine, Options};

    /// Whether the grammar accepts this text as an answer.
    pub(super) fn takes(engine: &Engine, grammar: &crate::Grammar, text: &str) -> bool {
        let options = EncodeOptions { special: true, bos: Bos::Never };
        let mut matcher = grammar.matcher().unwrap();
        engine.tokenizer().encode(text, options).unwrap().into_iter().all(|token| {
            let allowed = matcher.allowed().unwrap().is_some_and(|mask| mask.allows(token));
            allowed && matcher.accept(token).is_ok()
        })
    }

    #[test]
    fn a_text_grammar_accepts_everything_but_calls() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-qwen3moe-Q4_K_M.gguf");
        let engine = Engine::open(&model, &Options { threads: Some(1), ..Options::default() }).unwrap();
        const HERMES: &str = "<tool_call>{\"name\": …, \"arguments\": …}</tool_call>";
        let thinks = format!("{HERMES}<think>");
        let said = "\n\nOnce a < b.\n\n{\"name\": 1} 東京 <tool>";
        for (template, prompt, fine, call) in [
            (HERMES, "", said, "Hm. <tool_call>"),
            (&thinks, "<think>\n", "a <tool_call> b</think>\n\nHello.", "a</think><tool_call>"),
            (&thinks, "", "\n<think>a</think>\n\nHello.", "\n<tool_call>"),
            ("<tool_call><function=<parameter=", "", said, "Hm.\n<function="),
            ("<minimax:tool_call><invoke name=", "", said, "<minimax:tool_call>"),
            ("<function name=<param name=<![CDATA[", "", said, "<function name="),
            ("[TOOL_CALLS][ARGS]", "", said, "Hm. [TOOL_CALLS]"),
            ("[TOOL_CALLS][THINK][ARGS]", "", "[THINK]Hm.[/THINK]Hello.", "[THINK]Hm.[/THINK][TOOL_CALLS]"),
            (
                "<|tool_call:begin|><|tool_call:name|><|tool_call:args|><|think|>",
                "<|begin|>assistant",
                "<|think|>Hm.<|end|><|begin|>assistant<|content|>Hello.",
                "<|tool_calls|>",
            ),
            ("<tool_call><arg_key>", "", said, "<tool_call>"),
            ("<｜tool▁call▁begin｜><｜tool▁sep｜>", "", said, "a<｜tool▁calls▁begin｜>"),
            ("<|tool_call_begin|><|tool_call_argument_begin|>", "", said, "a<|tool_call_begin|>"),
            ("<|tool_call><tool_call|><|\"|>", "", said, "a<|tool_call>"),
            ("<|tool_call|><|start_of_role|>", "", said, "a<|tool_call|>"),
            ("<|tool_call_start|><|tool_call_end|>", "", said, "a<|tool_call_start|>"),
            (
                "<|START_THINKING|><|START_ACTION|>\"tool_name\":<|START_TEXT|>",
                "<|START_THINKING|>",
                "a<|END_THINKING|><|START_TEXT|>Hello.<|END_TEXT|>",
                "a<|END_THINKING|><|START_ACTION|>",
            ),
            (
                "<|channel|><|message|>",
                "<|start|>assistant",
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
                "<|channel|>commentary to=functions.f",
            ),
        ] {
            let source = Dialect::of(template).text_grammar(prompt).unwrap();
            let grammar = crate::Grammar::lark(&engine, &source).unwrap();
            assert!(takes(&engine, &grammar, fine), "{template}: {fine:?} in {source}");
            assert!(!takes(&engine, &grammar, call), "{template}: {call:?} in {source}");
        }
        assert_eq!(Dialect::of("").text_grammar(""), None);
        // Reasoning before a required call contains no call in another format. Without tools there is nothing to
        // call.
        let tools = [json!({ "name": "now" })];
        let dialect = Dialect::of(&thinks);
        let call = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
        let source = dialect.call_grammar("<think>", &tools).unwrap();
        let grammar = crate::Grammar::lark(&engine, &source).unwrap();
        assert!(takes(&engine, &grammar, &format!("Hm. <tool_c>\n</think>\n\n{call}")), "{source}");
        assert!(!takes(&engine, &grammar, "Hm. <tool_call>"), "{source}");
        for (tools, takes_mention) in [(&tools[..], false), (&[], true)] {
            let source = dialect.answer_grammar("", &json!({ "type": "boolean" }), tools);
            let grammar = crate::Grammar::lark(&engine, &source).unwrap();
            assert!(takes(&engine, &grammar, "<think>Hm.</think>\n\ntrue"), "{source}");
            assert_eq!(takes(&engine, &grammar, "<think>Hm. <tool_call>"), takes_mention, "{source}");
        }
    }
}
