// Tokens coloured by how likely they were, and the card that shows what else the model thought of.

const UNLIKELY = Math.log(0.01); // log-probability at which a token has all of the colour; 0 has none

/** The tokens of OpenAI's logprobs as {text, token, logprob, top}: `text` is what it adds to the answer. A character whose bytes are spread over several tokens is
 * shown at the last of them. `decoder` belongs to one answer. */
export function tokensOf(content, decoder) {
  return content.map(({ token, bytes, logprob, top_logprobs }) => ({
    text: bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token,
    token,
    logprob,
    top: top_logprobs ?? [],
  }));
}

/** e to the mean surprise: 1 when every token was certain. */
export function perplexity(tokens) {
  return Math.exp(-tokens.reduce((total, token) => total + token.logprob, 0) / tokens.length);
}

/** Shows the tokens that `container` does not show yet. `content`: the whole answer, once it is known; tokens that are
 * no part of it, such as the one that ends it, are set apart. */
export function render(container, tokens, content = null) {
  for (const token of tokens.slice(container.children.length)) {
    const span = document.createElement("span");
    const share = Math.sqrt(Math.min(1, Math.max(0, token.logprob / UNLIKELY))); // a doubt already shows
    span.className = token.logprob < Math.log(0.5) ? "token doubtful" : "token";
    span.style.setProperty("--surprise", `${Math.round(share * 100)}%`);
    span.textContent = token.text;
    span.tabIndex = container.children.length ? -1 : 0; // one stop for the Tab key; the arrows go on from there
    span.token = token;
    container.append(span);
  }
  if (content === null) return;
  const start = tokens.map(({ text }) => text).join("").lastIndexOf(content);
  let at = 0;
  for (const span of container.children) {
    const end = at + span.token.text.length;
    span.classList.toggle("silent", start >= 0 && (end <= start || at >= start + content.length));
    at = end;
  }
}

/** Makes `card` follow the pointer and the focus over the tokens inside `area`. */
export function showAlternatives(area, card) {
  const tokenAt = (event) => event.target.closest?.(".token");
  const hide = () => {
    card.hidden = true;
  };
  const show = (span) => {
    card.replaceChildren(...rowsOf(span.token));
    card.hidden = false;
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.min(box.left, innerWidth - card.offsetWidth - 8);
    const below = box.bottom + 6 + card.offsetHeight < innerHeight;
    card.style.left = `${Math.max(8, left)}px`;
    card.style.top = `${below ? box.bottom + 6 : Math.max(8, box.top - 6 - card.offsetHeight)}px`;
  };
  area.addEventListener("pointerover", (event) => (tokenAt(event) ? show(tokenAt(event)) : hide()));
  area.addEventListener("pointerleave", hide);
  area.addEventListener("focusin", (event) => (tokenAt(event) ? show(tokenAt(event)) : hide()));
  area.addEventListener("focusout", hide);
  area.addEventListener("scroll", hide, { capture: true, passive: true });
  area.addEventListener("keydown", (event) => {
    const span = tokenAt(event);
    const next = {
      ArrowRight: span?.nextElementSibling,
      ArrowLeft: span?.previousElementSibling,
      Home: span?.parentElement.firstElementChild,
      End: span?.parentElement.lastElementChild,
    }[event.key];
    if (event.key === "Escape") hide();
    if (!next) return;
    event.preventDefault();
    span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    show(next);
  });
}

/** Spaces and line ends as something that can be seen. */
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

function rowsOf({ token, logprob, top }) {
  const isListed = top.some((candidate) => candidate.token === token);
  return (isListed ? top : [...top, { token, logprob }]).map((candidate) => {
    const row = document.createElement("div");
    const [name, bar, share] = ["span", "meter", "span"].map((tag) => document.createElement(tag));
    row.className = candidate.token === token ? "chosen" : "";
    name.textContent = visible(candidate.token);
    bar.value = Math.exp(candidate.logprob);
    share.textContent = percent(Math.exp(candidate.logprob));
    row.append(name, bar, share);
    return row;
  });
}

function percent(share) {
  return share > 0 && share < 0.001 ? "< 0.1 %" : `${(share * 100).toFixed(1)} %`;
}
