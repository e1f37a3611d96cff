"""A report on the sharing of rollouts: one page to read and explore, or pictures to print.

    Subject --figures--> Figures --page, with texts--> HTML        in one file
                                 --pictures--> PNG files

`parts` computes the sharing in each group and tree, `figures` the numbers of every chart, and `words` the same in
sentences. `charts` makes specifications for Vega-Lite, `texts` the text of the nodes within a limit, and `payload` the
compressed columns that the explorer reads. `outline` computes the places of the nodes in a drawn tree, and `rebuilt`
the trie of a packed directory whose own trie is missing. The page itself is page.html, page.css, data.js, tree.js and
page.js.
"""
