//! Owns reading a page of the text format back into samples.
//! Refuses lines that it does not understand: a page with one is not a page.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

#[derive(Clone, Debug)]
pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

impl Sample {
    pub fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }
}

#[derive(Clone, Debug)]
pub struct Scrape {
    pub text: String,
    pub samples: Vec<Sample>,
}

impl Scrape {
    pub fn parse(text: &str) -> Result<Self> {
        let samples = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty())
            .map(|line| sample(line).with_context(|| format!("not a sample: {line}")))
            .collect::<Result<_>>()?;
        Ok(Self { text: text.to_owned(), samples })
    }

    pub fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| sample.name == name)
    }

    /// The one sample with these labels, others aside; `None` if there is none or more than one.
    pub fn get(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let mut found =
            self.of(name).filter(|sample| labels.iter().all(|(key, value)| sample.label(key) == *value));
        let first = found.next()?;
        found.next().is_none().then_some(first.value)
    }

    /// The sum over every sample with these labels.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.of(name)
            .filter(|sample| labels.iter().all(|(key, value)| sample.label(key) == *value))
            // Not `sum`: that of nothing is -0.0.
            .fold(0.0, |sum, sample| sum + sample.value)
    }
}

fn sample(line: &str) -> Result<Sample> {
    let (series, value) = line.rsplit_once(' ').context("a value")?;
    let (name, rest) = series.split_once('{').unwrap_or((series, ""));
    let mut labels = BTreeMap::new();
    let mut rest = rest.strip_suffix('}').unwrap_or(rest);
    while !rest.is_empty() {
        let (key, after) = rest.split_once("=\"").context("a label")?;
        let mut value = String::new();
        let mut characters = after.char_indices();
        let end = loop {
            match characters.next().context("a closing quote")? {
                (at, '"') => break at,
                (_, '\\') => value.push(match characters.next().context("an escape")?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.insert(key.to_owned(), value);
        rest = after[end + 1..].trim_start_matches(',');
    }
    Ok(Sample { name: name.to_owned(), labels, value: value.parse()? })
}
