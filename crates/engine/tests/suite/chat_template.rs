//! Chat templates render the same text as Hugging Face's code.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use forebay_engine::chat::{ChatTemplate, Message, RenderOptions};
use forebay_engine::internals::format::ModelFile;
use forebay_engine::tokenizer::Tokenizer;
use forebay_engine::{Error, Result};
use forebay_testing::shared;
use serde_json::{Value as Json, json};

use crate::common::templates::{Template, templates};

fn conversation() -> Vec<Message> {
    vec![
        Message::new("system", "You tell <short> stories."),
        Message::new("user", "Tell me about a \"boat\" & 猫."),
    ]
}

/// Renders a conversation with the prompt for an answer.
fn render(source: &str) -> Result<String> {
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    ChatTemplate::new(source, &[("bos_token", "<s>"), ("eos_token", "</s>")])?
        .render(&conversation(), &options)
}

fn refusal(source: &str) -> String {
    match render(source) {
        Err(Error::Invalid(message)) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_demo_models_template_writes_chatml() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-qwen3moe-Q4_K_M.gguf");
    let metadata = ModelFile::open(&path).unwrap().metadata;
    let tokenizer = Tokenizer::from_metadata(&path, &metadata).unwrap();
    let template = ChatTemplate::from_metadata(&path, &metadata, &tokenizer).unwrap().unwrap();
    let turns = "<|im_start|>system\nYou tell <short> stories.<|im_end|>\n\
                 <|im_start|>user\nTell me about a \"boat\" & 猫.<|im_end|>\n";
    let mut options = RenderOptions::default();
    assert_eq!(template.render(&conversation(), &options).unwrap(), turns);
    options.add_generation_prompt = true;
    assert_eq!(
        template.render(&conversation(), &options).unwrap(),
        format!("{turns}<|im_start|>assistant\n")
    );
}

#[test]
fn every_shared_template_renders() {
    let Some(folder) = shared("templates") else { return };
    let mut seen = 0;
    for path in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_some_and(|e| e == "jinja") {
            let text = render(&std::fs::read_to_string(&path).unwrap());
            let text = text.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert!(text.contains("a \"boat\" & 猫."), "{}: {text}", path.display());
            seen += 1;
        }
    }
    assert!(seen > 0);
}

#[test]
fn blocks_leave_no_empty_lines() {
    let source = "{% for m in messages %}\n  {% if loop.first %}\n[{{ m.role }}]\n  {% endif %}\n\
                  {% endfor %}\n-{{ bos_token }}{{ eos_token }}\n";
    assert_eq!(render(source).unwrap(), "[system]\n-<s></s>");
}

#[test]
fn values_look_as_in_python() {
    assert_eq!(
        render("{{ true }} {{ none }} {{ tools }} {{ undefined_name }}.").unwrap(),
        "True None None ."
    );
    assert_eq!(
        render("{{ messages[1]|tojson }}").unwrap(),
        r#"{"role": "user", "content": "Tell me about a \"boat\" & 猫."}"#
    );
    assert_eq!(render("{{ messages[0].content.split(' ')[-1].upper().strip('.') }}").unwrap(), "STORIES");
    let first =
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m['role'] }}{% endfor %}";
    assert_eq!(render(first).unwrap(), "system");
    let tests = "{{ none is iterable }} {{ 'a' is sequence }} {{ {} is sequence }} {{ 1 is sequence }}";
    assert_eq!(render(tests).unwrap(), "False True True False");
}

#[test]
fn templates_get_all_variables_of_the_caller() {
    let message: Message =
        serde_json::from_value(json!({"role": "assistant", "tool_calls": [{"id": 7}], "z": 1, "a": 2}))
            .unwrap();
    let options = RenderOptions {
        tools: vec![json!({"name": "look", "args": {"z": 1, "a": 0.5}})],
        kwargs: json!({"enable_thinking": false}).as_object().unwrap().clone(),
        now: Some(UNIX_EPOCH + Duration::from_secs(1_722_000_000)),
        ..RenderOptions::default()
    };
    let source = "{{ messages[0].content is defined }} {{ messages[0].tool_calls[0].id }} \
                  {{ messages[0]|list|join(',') }}\n\
                  {{ tools[0]|tojson }} {{ enable_thinking is false }} {{ add_generation_prompt }}\n\
                  {{ bos_token is defined }} {{ strftime_now('%d %b %Y') }}";
    let text = ChatTemplate::new(source, &[]).unwrap().render(&[message], &options).unwrap();
    assert_eq!(
        text,
        "False 7 role,tool_calls,z,a\n\
         {\"name\": \"look\", \"args\": {\"z\": 1, \"a\": 0.5}} True False\n\
         False 26 Jul 2024"
    );
}

#[test]
fn a_refusal_has_the_templates_message() {
    let message = refusal("{{ raise_exception('Roles must alternate!') }}");
    assert_eq!(message, "the chat template refuses the conversation: Roles must alternate!");
    let message =
        refusal("{% macro m() %}{{ raise_exception('No ' + messages[1].role) }}{% endmacro %}{{ m() }}");
    assert_eq!(message, "the chat template refuses the conversation: No user");
}

#[test]
fn errors_name_the_line() {
    let message = refusal("a\nb\n{% if %}");
    assert!(message.contains("does not compile: line 3"), "{message}");
    let message = refusal("a\n{{ nothing.at.all }}");
    assert!(message.contains("failed: line 2"), "{message}");
}

#[test]
fn endless_templates_are_stopped() {
    let inner =
        "{% for b in range(10000) %}{% for c in range(10000) %}{% if c %}{% endif %}{% endfor %}{% endfor %}";
    let endless = &format!("{{% for a in range(10000) %}}{inner}{{% endfor %}}");
    assert!(refusal(endless).contains("fuel"), "{}", refusal(endless));
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(refusal(recursive).contains("recursion"), "{}", refusal(recursive));
}

#[test]
fn templates_that_build_without_end_are_stopped() {
    let doubled = |step: &str| {
        format!(
            "{{% set ns = namespace(x='0123456789', y=[1]) %}}{{% for i in range(99) %}}{step}{{% endfor %}}"
        )
    };
    for template in [
        doubled("{% set ns.x = ns.x ~ ns.x %}"),
        doubled("{% set ns.x = ns.x + ns.x %}"),
        doubled("{% set ns.x = ns.x * 9 %}"),
        doubled("{% set ns.y = ns.y + ns.y %}"),
        doubled("{% set ns.x = ns.x|replace('', ns.x) %}"),
        doubled("{% set ns.x = ns.x.replace('1', ns.x) %}"),
        doubled("{% set ns.x = [ns.x, ns.x]|join(ns.x) %}"),
        doubled("{% set ns.y = [ns.y, ns.y] %}") + "{{ ns.y }}",
        doubled("{% set ns.y = [ns.y, ns.y] %}") + "{{ ns.y|tojson }}",
        doubled("{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}"),
        "{% for i in range(99999) %}{% for j in range(99999) %}some text of the template{% endfor %}{% endfor %}".into(),
        "{{ 'a' * 99999999999 }}".into(),
        "{{ '%999999999d'|format(1) }}".into(),
        "{{ '{:>999999999}'.format('x') }}".into(),
        "{{ 'a'|indent(99999999999, first=true) }}".into(),
    ] {
        let message = refusal(&template);
        assert!(["MiB", "too long", "fuel"].iter().any(|part| message.contains(part)), "{template}: {message}");
    }
}

#[test]
fn a_model_may_have_a_template_for_tools() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    assert!(ChatTemplate::from_folder(folder.path()).unwrap().is_none());
    write(
        "tokenizer_config.json",
        r#"{"bos_token": {"content": "<s>"}, "eos_token": null, "pad_token": "<pad>", "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ pad_token }}{{ eos_token is defined }}"},
            {"name": "tool_use", "template": "tools: {{ tools|length }}"}]}"#,
    );
    let render = |tools: &[serde_json::Value]| {
        let options = RenderOptions { tools: tools.to_vec(), ..RenderOptions::default() };
        ChatTemplate::from_folder(folder.path()).unwrap().unwrap().render(&conversation(), &options).unwrap()
    };
    assert_eq!(render(&[]), "<s><pad>False");
    assert_eq!(render(&[json!({})]), "tools: 1");
    // A separate file takes precedence.
    write("chat_template.jinja", "{% generation %}\nfile {{ messages|length }}{% endgeneration %}");
    assert_eq!(render(&[json!({})]), "file 2");
    write("chat_template.jinja", "{% if %}");
    let error = ChatTemplate::from_folder(folder.path()).unwrap_err();
    assert!(matches!(&error, Error::Format { path, .. } if path.ends_with("chat_template.jinja")), "{error}");
}

#[test]
fn values_nested_without_end_are_stopped() {
    let nest = |step: &str| {
        let rounds = "{% for i in range(9999) %}{% for j in range(999) %}";
        format!("{{% set ns = namespace(x=1) %}}{rounds}{step}{{% endfor %}}{{% endfor %}}")
    };
    for step in [
        "{% set ns.x = [ns.x] %}",
        "{% set ns.x = {'a': ns.x} %}",
        "{% set ns.x = (ns.x, 1) %}",
        "{% set ns.x = dict(a=ns.x) %}",
        "{% set n = namespace(a=ns.x) %}{% set ns.x = n %}",
        "{% set n = namespace() %}{% set n.a = ns.x %}{% set ns.x = n %}",
        "{% set ns.x = [1]|map('string') if i + j == 0 else ns.x|map('string') %}",
        "{% set ns.x = [1]|select if i + j == 0 else ns.x|select %}",
        "{% set ns.x = [1]|reverse if i + j == 0 else ns.x|reverse %}",
        "{% set ns.x = [1][:] if i + j == 0 else ns.x[::-1] + [1] %}",
    ] {
        let message = refusal(&nest(step));
        assert!(
            message.contains("fuel") || message.contains("MiB") || message.contains("nested"),
            "{message}"
        );
    }
}

#[test]
fn templates_change_their_own_lists() {
    let source = "{% set ns = namespace(ids=[]) %}{% for m in messages %}{% set _ = ns.ids.append(m.role) %}{% endfor %}\
                  {{ ns.ids }} {{ ns.ids.pop(0) }} {{ ns.ids }} {% set l = [1] %}{% set _ = l.extend([2, 3]) %}\
                  {% set _ = l.insert(-1, 9) %}{{ l.pop() }}{{ l }}{{ l|length }}{{ l[-1] }}{{ l == [1, 2, 9] }}";
    let template = ChatTemplate::new(source, &[]).unwrap();
    // Each rendering starts from fresh lists.
    for _ in 0..2 {
        let text = template.render(&conversation(), &RenderOptions::default()).unwrap();
        assert_eq!(text, "['system', 'user'] system ['user'] 3[1, 2, 9]39True");
    }
    // A copy is appended, so that no list contains itself and none is nested more deeply than allowed.
    let twice = "{% set l = [] %}{% set _ = l.append(l) %}{% set _ = l.append(l) %}{{ l }}";
    assert_eq!(render(twice).unwrap(), "[[], [[]]]");
    for endless in [
        "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set _ = ns.x.append([]) %}\
         {% set ns.x = ns.x[0] %}{% endfor %}",
        "{% set l = [1] %}{% for i in range(99) %}{% set _ = l.extend(l) %}{% endfor %}",
        "{{ [].pop() }}",
    ] {
        refusal(endless);
    }
}

/// Renders as servers do: a few templates only take arguments as strings.
fn rendered(template: &ChatTemplate, messages: &Json, options: &RenderOptions) -> Result<String> {
    let messages: Vec<Message> = serde_json::from_value(messages.clone()).unwrap();
    let render = |messages: Vec<Message>| template.render(&template.adapt(messages, options), options);
    render(messages.clone()).or_else(|error| {
        let mut textual = messages;
        for message in &mut textual {
            for call in message.extra.get_mut("tool_calls").and_then(Json::as_array_mut).into_iter().flatten()
            {
                call["function"]["arguments"] = call["function"]["arguments"].to_string().into();
            }
        }
        render(textual).map_err(|_| error)
    })
}

#[test]
fn answers_that_call_tools_are_accepted_as_messages() {
    let call = json!([{ "id": "call_1", "type": "function",
        "function": { "name": "look", "arguments": { "city": "Bern" } } }]);
    let tool = json!({ "type": "function", "function": { "name": "look", "description": "Looks.",
        "parameters": { "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] } } });
    // As the APIs return answers: with null, without content, with an empty string, with reasoning.
    let answers = [
        json!({ "role": "assistant", "content": null, "tool_calls": call }),
        json!({ "role": "assistant", "tool_calls": call }),
        json!({ "role": "assistant", "content": "", "tool_calls": call }),
        json!({ "role": "assistant", "content": null, "reasoning_content": "Hm.", "tool_calls": call }),
    ];
    let strict = "{% for m in messages %}{{ m.content + '.' }}{% endfor %}";
    let printing = "{% for m in messages %}{{ m.content }}.{% endfor %}";
    let ours = [("strict", strict), ("printing", printing)];
    let ours = ours.map(|(name, source)| Template { name: name.into(), source: source.into() });
    for Template { name, source } in templates().into_iter().chain(ours) {
        // These templates are not for chats.
        if ["values.jinja", "jinja.jinja"].contains(&&*name) {
            continue;
        }
        let template = ChatTemplate::new(&source, &[("bos_token", "<s>"), ("eos_token", "</s>")]).unwrap();
        let options = RenderOptions {
            add_generation_prompt: true,
            tools: vec![tool.clone()],
            ..RenderOptions::default()
        };
        for answer in &answers {
            let messages = json!([{ "role": "user", "content": "Weather?" }, answer,
                { "role": "tool", "tool_call_id": "call_1", "content": "rain today" }]);
            let text =
                rendered(&template, &messages, &options).unwrap_or_else(|e| panic!("{name}: {answer}: {e}"));
            assert!(text.contains("rain today"), "{name}: {text}");
            let answered = &text[text.find("Weather?").unwrap()..];
            assert!(!answered.contains("None") && !answered.contains("null"), "{name}: {answer}: {answered}");
        }
    }
}

#[test]
fn system_messages_are_rendered_wherever_they_are() {
    let messages = json!([
        { "role": "system", "content": "first rule" },
        { "role": "system", "content": "second rule" },
        { "role": "user", "content": "a question" },
        { "role": "system", "content": "third rule" },
        { "role": "assistant", "content": "an answer" },
        { "role": "developer", "content": "fourth rule" },
        { "role": "user", "content": "more questions" },
    ]);
    for Template { name, source } in templates() {
        if ["values.jinja", "jinja.jinja"].contains(&&*name) {
            continue;
        }
        // As servers do if a template has no developer role.
        let mut messages = messages.clone();
        if !source.contains("developer") {
            messages[5]["role"] = "system".into();
        }
        let template = ChatTemplate::new(&source, &[("bos_token", "<s>"), ("eos_token", "</s>")]).unwrap();
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let text = rendered(&template, &messages, &options).unwrap_or_else(|e| panic!("{name}: {e}"));
        for part in ["first rule", "second rule", "third rule", "fourth rule", "a question", "an answer"] {
            assert!(text.contains(part), "{name}: {part}: {text}");
        }
    }
    // A template that demands one system message and alternating turns gets them, in the order of the conversation.
    let strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}\
                  {% elif not loop.first and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('turns') }}\
                  {% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    let template = ChatTemplate::new(strict, &[]).unwrap();
    let text = rendered(&template, &messages, &RenderOptions::default()).unwrap();
    assert_eq!(
        text,
        "[system]first rule\n\nsecond rule[user]a question\n\nthird rule[assistant]an answer\
         [user]fourth rule\n\nmore questions"
    );
    let none = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}\
                [{{ m.role }}]{{ m.content }}{% endfor %}";
    let template = ChatTemplate::new(none, &[]).unwrap();
    let text = rendered(&template, &messages, &RenderOptions::default()).unwrap();
    assert!(
        text.starts_with("[user]first rule\n\nsecond rule\n\na question\n\nthird rule[assistant]"),
        "{text}"
    );
    // A template that accepts all of them gets them unchanged.
    let chatml = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    let template = ChatTemplate::new(chatml, &[]).unwrap();
    let text = rendered(&template, &messages, &RenderOptions::default()).unwrap();
    assert!(text.contains("[system]third rule") && text.contains("[developer]fourth rule"), "{text}");
}

#[test]
fn a_message_of_many_fields_is_read_at_once() {
    let extra = (0..400_000).map(|i| (format!("field_{i}"), Json::from(i))).collect();
    let message = Message { extra, ..Message::new("user", "") };
    let template = ChatTemplate::new("{{ messages[0].field_7 }}", &[]).unwrap();
    let start = std::time::Instant::now();
    assert_eq!(template.render(&[message], &RenderOptions::default()).unwrap(), "7");
    // It takes a fraction of a second; searching all fields for each field would take minutes.
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}
