//! What the dashboard shows.

#[expect(dead_code, reason = "its callers come with the API and `top`")]
pub(crate) mod verdict;
