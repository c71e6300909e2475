//! From a conversation to the tokens that the model continues.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use forebay_engine::chat::dialect::{Dialect, Parser};
use forebay_engine::chat::{ChatTemplate, Message, RenderOptions};
use forebay_engine::{Engine, Request, TokenId};

use crate::args::{on_off, read_text};

/// How a conversation is put to the model.
#[derive(Args)]
pub struct PromptingArgs {
    /// What the model is told first
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "raw")]
    system: Option<String>,
    /// Let the model reason first or not, where its chat template can say that [default: the template's]
    #[arg(long, value_name = "on|off", value_parser = on_off, conflicts_with = "raw")]
    think: Option<bool>,
    /// The most tokens of reasoning: then the model is made to answer [default: no limit]
    #[arg(long, value_name = "N", conflicts_with = "raw")]
    think_budget: Option<usize>,
    /// A chat template to use instead of the model's, in Jinja
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    chat_template_file: Option<PathBuf>,
}

impl PromptingArgs {
    /// Reads the template's file, if there is one.
    pub fn prompting(&self, engine: &Engine) -> Result<Prompting> {
        let template = self.chat_template_file.as_ref().map(|path| read_template(path, engine));
        Ok(Prompting {
            template: template.transpose()?.map(Arc::new),
            system: self.system.clone(),
            think: self.think,
            think_budget: self.think_budget,
            ..Prompting::default()
        })
    }
}

/// A chat template from a file, for a model.
pub fn read_template(path: &Path, engine: &Engine) -> Result<ChatTemplate> {
    let tokenizer = engine.tokenizer();
    let special = [("bos_token", tokenizer.bos()), ("eos_token", tokenizer.eos())];
    let texts: Vec<(&str, String)> = special
        .into_iter()
        .filter_map(|(name, id)| Some((name, tokenizer.token_text(id?).into_owned())))
        .collect();
    let texts: Vec<(&str, &str)> = texts.iter().map(|(name, text)| (*name, text.as_str())).collect();
    ChatTemplate::new(&read_text(path)?, &texts)
        .with_context(|| format!("{} is not a chat template", path.display()))
}

/// How messages become a prompt.
#[derive(Default)]
pub struct Prompting {
    /// Instead of the model's.
    pub template: Option<Arc<ChatTemplate>>,
    /// What the model is told first.
    pub system: Option<String>,
    /// Whether it reasons first; if nothing is said, as the template has it.
    pub think: Option<bool>,
    /// The most tokens of reasoning.
    pub think_budget: Option<usize>,
    /// The tools that the model may call.
    pub tools: Vec<serde_json::Value>,
    /// Further variables of the template.
    pub kwargs: serde_json::Map<String, serde_json::Value>,
    /// Whether a prompt may be longer than the context: it is counted or shown, and not answered.
    pub any_length: bool,
}

/// A prompt.
pub struct Prompt {
    pub text: String,
    pub tokens: Vec<TokenId>,
}

impl Prompting {
    /// Finds out whether there is a template, before anybody types a question.
    pub fn check(&self, engine: &Engine) -> Result<()> {
        self.template(engine).map(drop)
    }

    /// The prompt that has the last of these messages answered.
    pub fn prompt(&self, engine: &Engine, messages: &[Message]) -> Result<Prompt> {
        let mut all: Vec<Message> = self.system.iter().map(|text| Message::new("system", text)).collect();
        all.extend_from_slice(messages);
        let mut options = RenderOptions {
            add_generation_prompt: true,
            tools: self.tools.clone(),
            kwargs: self.kwargs.clone(),
            ..RenderOptions::default()
        };
        if let Some(think) = self.think {
            // Templates have either name.
            options.kwargs.insert("enable_thinking".into(), think.into());
            options.kwargs.insert("thinking".into(), think.into());
        }
        // A template writes the BOS token itself where the model wants one.
        let template = self.template(engine)?;
        let rendered = template.write(&template.adapt(all, &options), &options)?;
        if !self.any_length {
            engine.check_length(&rendered.text)?;
        }
        let _memory = engine.hold_for_encoding(&rendered.text)?;
        let tokens = rendered.encode(engine.tokenizer())?;
        Ok(Prompt { text: rendered.text, tokens })
    }

    /// Has a request ask for the answer to the last of these messages. Gives what tells the parts of the answer apart: what
    /// must be something is all answer.
    pub fn ask(
        &self,
        engine: &Engine,
        messages: &[Message],
        request: &mut Request,
    ) -> Result<Option<Parser>> {
        let Prompt { text, tokens } = self.prompt(engine, messages)?;
        let dialect = self.dialect(engine)?;
        request.prompt = tokens;
        request.shown = dialect.shown(&self.tools);
        if request.grammar.is_some() {
            return Ok(None);
        }
        let limit = |most| dialect.limit(most, &text, &self.tools, engine.tokenizer());
        request.reasoning = self.think_budget.map(limit).transpose()?;
        Ok(Some(dialect.parser(&text, &self.tools)))
    }

    /// How the model writes what answers a prompt.
    pub fn dialect(&self, engine: &Engine) -> Result<Dialect> {
        Ok(Dialect::of(self.template(engine)?.source()).with_tokens(engine.tokenizer()))
    }

    /// The template in effect.
    ///
    /// # Errors
    /// If there is none.
    pub fn template<'a>(&'a self, engine: &'a Engine) -> Result<&'a ChatTemplate> {
        match &self.template {
            Some(template) => Ok(template),
            None => engine.template()?.with_context(|| {
                let path = engine.file().path().display();
                format!(
                    "{path} has no chat template; give one with --chat-template-file, or use --raw -p TEXT to \
                     continue a text as it is"
                )
            }),
        }
    }
}
