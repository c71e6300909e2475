//! Adapts a conversation to what a template can render.
//!
//! Clients send conversations that published templates refuse, drop or print wrongly: tool calls without content,
//! system messages in the middle. What a template accepts is found out once, by rendering small conversations.

use std::sync::OnceLock;

use serde_json::{Map, Value as Json, json};

use super::{ChatTemplate, Message, RenderOptions};

/// What a template accepts.
#[derive(Clone, Copy, Debug)]
struct Accepts {
    /// An assistant message whose content is null: with tool calls, and without.
    null_content: [bool; 2],
    /// An assistant message without content: with tool calls, and without.
    no_content: [bool; 2],
    /// A system message at the start.
    system: bool,
    /// Further system messages, directly after the first and later.
    later_system: bool,
}

/// What a template accepts, in conversations without tools and with tools, because a model may have a template for
/// each.
#[derive(Debug, Default)]
pub(super) struct Findings([OnceLock<Accepts>; 2]);

impl ChatTemplate {
    /// Changes the messages so that the template renders all of their text:
    ///
    /// - Null or absent content becomes an empty string, unless the template handles its absence.
    /// - System messages at the start are joined into one. If the template refuses or drops later ones, they become
    ///   user messages in the same place. So does the first, if the template has no system messages.
    pub fn adapt(&self, messages: Vec<Message>, options: &RenderOptions) -> Vec<Message> {
        let with_tools = !options.tools.is_empty() && self.sources.tool_use.is_some();
        let finding = &self.findings.0[usize::from(with_tools)];
        let accepts = finding.get_or_init(|| Accepts::of(self, with_tools));
        let mut messages = messages;
        messages.iter_mut().for_each(|message| accepts.fill(message));
        let first = messages.iter().take_while(|message| is_system(message)).count();
        let later = messages.iter().skip(1).any(is_system);
        if (first > 0 && !accepts.system) || (later && !accepts.later_system) {
            messages = fold(messages, first, accepts.system);
        }
        messages
    }
}

impl Accepts {
    fn of(template: &ChatTemplate, with_tools: bool) -> Accepts {
        let user = || Message::new("user", "probe user");
        let system = |text: &str| Message::new("system", text);
        let mut options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        if with_tools {
            let function = json!({ "name": "probe", "description": "", "parameters": { "type": "object", "properties": {} } });
            options.tools.push(json!({ "type": "function", "function": function }));
        }
        let render = |messages: &[Message]| template.render(messages, &options).ok();
        let shows = |messages: &[Message], texts: &[&str]| {
            render(messages).is_some_and(|prompt| texts.iter().all(|text| prompt.contains(text)))
        };
        // Some templates take arguments as objects, others as strings.
        let with_content = |content: Option<Json>, calls: Option<&Json>| {
            let mut extra = Map::new();
            let result = calls.map(|arguments| {
                let function = json!({ "name": "probe", "arguments": arguments });
                let call = json!([{ "id": "call_123", "type": "function", "function": function }]);
                extra.insert("tool_calls".into(), call);
                let extra = json!({ "name": "probe", "tool_call_id": "call_123" });
                Message { extra: extra.as_object().cloned().unwrap_or_default(), ..Message::new("tool", "1") }
            });
            let answer = Message { role: "assistant".into(), content, extra };
            let mut messages = vec![user(), answer];
            messages.extend(result.or_else(|| Some(user())));
            render(&messages)
        };
        let takes = |content: Option<Json>, calls: bool| {
            let arguments: &[Option<Json>] =
                if calls { &[Some(json!({ "a": 1 })), Some(json!("{\"a\": 1}"))] } else { &[None] };
            let found = arguments
                .iter()
                .find_map(|arguments| Some((arguments, with_content(Some("".into()), arguments.as_ref())?)));
            // If even an empty string is not rendered, the test says nothing about null.
            let Some((arguments, empty)) = found else { return true };
            let nones = |prompt: &str| prompt.matches("None").count() + prompt.matches("null").count();
            with_content(content, arguments.as_ref()).is_some_and(|prompt| nones(&prompt) == nones(&empty))
        };
        Accepts {
            null_content: [true, false].map(|calls| takes(Some(Json::Null), calls)),
            no_content: [true, false].map(|calls| takes(None, calls)),
            system: shows(&[system("probe one"), user()], &["probe one"]),
            later_system: shows(
                &[
                    system("probe one"),
                    system("probe two"),
                    user(),
                    Message::new("assistant", "probe answer"),
                    system("probe three"),
                    user(),
                ],
                &["probe one", "probe two", "probe three"],
            ),
        }
    }

    /// Replaces missing content by an empty string if the template needs content.
    fn fill(&self, message: &mut Message) {
        let calls =
            message.extra.get("tool_calls").and_then(Json::as_array).is_some_and(|all| !all.is_empty());
        let case = usize::from(!calls);
        let accepted = match &message.content {
            None => self.no_content[case],
            Some(Json::Null) => self.null_content[case],
            Some(_) => return,
        };
        if message.role != "assistant" || !accepted {
            message.content = Some("".into());
        }
    }
}

/// Joins the first system messages into one, or turns them into user messages, and turns the later ones into user
/// messages.
fn fold(messages: Vec<Message>, first: usize, keeps_system: bool) -> Vec<Message> {
    let mut folded: Vec<Message> = Vec::with_capacity(messages.len());
    // Whether the next user message joins text that came from a system message.
    let mut to_next = false;
    for (i, mut message) in messages.into_iter().enumerate() {
        let is_system = is_system(&message);
        if is_system && !(keeps_system && i < first) {
            message.role = "user".into();
        }
        let joins = match folded.last() {
            Some(last) if keeps_system && is_system && i < first => self::is_system(last),
            // Templates expect user and assistant to take turns.
            Some(last) => last.role == "user" && message.role == "user" && (is_system || to_next),
            None => false,
        };
        to_next = is_system && message.role == "user";
        match folded.last_mut().filter(|_| joins) {
            Some(last) => last.content = Some(joined(last.content.take(), message.content).into()),
            None => folded.push(message),
        }
    }
    folded
}

/// Whether a message instructs the model. Templates with a developer role treat it like the system.
fn is_system(message: &Message) -> bool {
    matches!(&*message.role, "system" | "developer")
}

/// Two texts as paragraphs of one text.
fn joined(one: Option<Json>, other: Option<Json>) -> String {
    let text = |content: Option<Json>| match content {
        Some(Json::String(text)) => text,
        Some(Json::Array(parts)) => {
            let texts = parts.iter().filter_map(|part| part.get("text").and_then(Json::as_str));
            texts.collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    };
    let (one, other) = (text(one), text(other));
    if one.is_empty() || other.is_empty() { one + &other } else { format!("{one}\n\n{other}") }
}
