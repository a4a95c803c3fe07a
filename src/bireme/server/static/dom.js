// Elements without markup: text stays text, whatever the model says.

/** An element; `properties` are set on it, those with a dash or `role` as attributes. Children: nodes or strings. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);
