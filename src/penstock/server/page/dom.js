// Elements from code. Text only ever becomes text nodes, so what a model writes can't become HTML.

/** A new element: h("p", {class: "dim", onclick: f}, "text", child). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Writes text where it differs; an unchanged node keeps its layout. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** At most one call of `draw` for each frame, however often the result is called. */
export function oncePerFrame(draw) {
  let asked = 0;
  return () => {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      draw();
    });
  };
}

/** Makes a parent's children from index `from` on equal to a tree of {tag, attrs, children} and
 *  strings, and touches only what differs: a reader's selection and scrolling stay. */
export function patch(parent, tree, from = 0) {
  let at = from;
  for (const node of tree) {
    const old = parent.childNodes[at];
    at += 1;
    if (typeof node === "string") patchText(parent, old, node);
    else if (old?.localName === node.tag && sameAttributes(old, node.attrs)) patch(old, node.children);
    else {
      const fresh = h(node.tag, node.attrs);
      patch(fresh, node.children);
      if (old) old.replaceWith(fresh);
      else parent.append(fresh);
    }
  }
  while (parent.childNodes.length > at) parent.lastChild.remove();
}

function patchText(parent, old, text) {
  if (old?.nodeType !== Node.TEXT_NODE) {
    if (old) old.replaceWith(text);
    else parent.append(text);
  } else if (text.startsWith(old.data)) {
    if (text.length > old.data.length) old.appendData(text.slice(old.data.length));
  } else old.data = text;
}

function sameAttributes(element, attributes) {
  const names = Object.keys(attributes);
  return names.length === element.attributes.length && names.every((name) => element.getAttribute(name) === attributes[name]);
}
