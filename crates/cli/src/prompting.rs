//! The flags for prompts: system prompt, reasoning and chat template.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use forebay_engine::chat::ChatTemplate;
use forebay_engine::{Engine, Prompter};

use crate::args::read_text;
use crate::values::on_off;

/// The flags for prompts.
#[derive(Args)]
#[command(next_help_heading = "Prompt")]
pub struct PromptingArgs {
    /// System prompt
    #[arg(
        long,
        visible_alias = "system-prompt",
        value_name = "TEXT",
        allow_hyphen_values = true,
        conflicts_with = "raw"
    )]
    pub system: Option<String>,
    /// Turn the model's reasoning on or off, if its chat template supports that [default: the template's choice]
    #[arg(long, value_name = "on|off", value_parser = on_off(), hide_possible_values = true, conflicts_with = "raw")]
    pub think: Option<bool>,
    /// Maximum number of reasoning tokens; the model then has to answer [default: no limit]
    #[arg(long, value_name = "N", conflicts_with = "raw")]
    pub think_budget: Option<usize>,
    /// Jinja chat template that replaces the model's
    #[arg(long, value_name = "FILE", conflicts_with = "raw")]
    chat_template_file: Option<PathBuf>,
}

impl PromptingArgs {
    /// A prompter with these settings. Reads the template's file, if one is given.
    pub fn prompter(&self, engine: &Engine) -> Result<Prompter> {
        let template = self.chat_template_file.as_ref().map(|path| read_template(path, engine));
        Ok(Prompter::new(engine).with_template(template.transpose()?.map(Arc::new)))
    }
}

/// A chat template from a file, for a model.
pub fn read_template(path: &Path, engine: &Engine) -> Result<ChatTemplate> {
    ChatTemplate::of_source(&read_text(path)?, engine.tokenizer())
        .with_context(|| format!("{} is not a chat template", path.display()))
}

/// Checks that there is a chat template, before the user types a message.
///
/// # Errors
/// If there is none.
pub fn check_template(prompter: &Prompter) -> Result<()> {
    let template = prompter.template()?.with_context(|| {
        let path = prompter.engine().file().path().display();
        format!(
            "{path} has no chat template; give one with --chat-template-file, or use --raw -p TEXT to \
             continue a text as it is"
        )
    });
    template.map(drop)
}
