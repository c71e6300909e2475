//! Chat templates.
use crate::error::Result;
/// T
pub struct ChatTemplate;
impl ChatTemplate {
    /// F
    pub fn from_metadata(_: &std::path::Path, _: &crate::format::Metadata, _: &crate::tokenizer::Tokenizer) -> Result<Option<ChatTemplate>> { Ok(None) }
}
