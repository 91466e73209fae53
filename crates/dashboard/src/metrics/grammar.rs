//! A strict parser of Prometheus' text format, for tests of our page.

/// One number: its metric, labels and value.
pub(crate) type Sample = (String, Vec<(String, String)>, f64);

pub(crate) fn parse(text: &str) -> Result<Vec<Sample>, String> {
    if !text.ends_with('\n') {
        return Err("the last line has no end".into());
    }
    let mut samples: Vec<Sample> = Vec::new();
    let mut told: Vec<&str> = Vec::new(); // metrics that were declared, each once
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let wrong = |what: &str| format!("{what}: {line}");
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ').ok_or(wrong("invalid help"))?;
            let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE ")?.strip_prefix(name));
            let kind = kind.ok_or(wrong("no type after the help"))?.trim_start();
            let ends_right = (kind == "counter") == name.ends_with("_total");
            if !is_name(name) || text.is_empty() || told.contains(&name) || !ends_right {
                return Err(wrong("invalid declaration"));
            }
            if !["counter", "gauge"].contains(&kind) {
                return Err(wrong("unknown type"));
            }
            told.push(name);
            continue;
        }
        let (name, labels, value) = sample(line).ok_or(wrong("invalid sample"))?;
        if told.last() != Some(&name.as_str()) {
            return Err(wrong("not in its metric's group"));
        }
        if samples.iter().any(|known| known.0 == name && known.1 == labels) {
            return Err(wrong("duplicate"));
        }
        samples.push((name, labels, value));
    }
    Ok(samples)
}

pub(crate) fn number(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let is_it = |sample: &&Sample| {
        let own = sample.1.iter().map(|(label, value)| (label.as_str(), value.as_str()));
        sample.0 == name && own.eq(labels.iter().copied())
    };
    samples.iter().find(is_it).map(|sample| sample.2)
}

fn sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.push((is_name(label).then_some(label)?.to_owned(), value));
            match after.strip_prefix(',') {
                Some(after) => rest = after,
                None => {
                    rest = after.strip_prefix('}')?;
                    break;
                }
            }
        }
    }
    let value: f64 = rest.strip_prefix(' ')?.parse().ok()?;
    (is_name(name) && value.is_finite()).then(|| (name.to_owned(), labels, value))
}

/// The text up to the closing quote, and what follows that.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match characters.next()?.1 {
                'n' => '\n',
                same @ ('\\' | '"') => same,
                _ => return None,
            }),
            other => value.push(other),
        }
    }
    None
}

fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|byte| byte.is_ascii_lowercase())
        && bytes.all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}
